"""Event files hold what the training had, at the model's updates, without TensorFlow."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import image_model, image_rows, in_shards

from insitu.base.context import Context
from insitu.base.errors import TrainingError
from insitu.train import BackupAndRestore, MultiWorkerMirroredStrategy, TensorBoard
from insitu.train.evaluation.event_files import EventFile, GraphNode
from insitu.train.evaluation.tensorboard import describe_graph
from insitu.train.replica import to_numpy


def read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protocol buffers: numbers as they are, others as bytes."""
    at = 0

    def read_number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = read_number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, read_number()
            continue
        size = {1: 8, 5: 4}.get(kind) or read_number()
        yield key >> 3, data[at : at + size]
        at += size


def read_events(folder: Path) -> list[tuple[int, str, Any]]:
    """Return (step, tag, value) of all events in a folder's files, the older file first."""
    found: list[tuple[int, str, Any]] = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = dict(read_fields(data[12 : 12 + length]))
            data = data[16 + length :]
            step = event.get(2, 0)
            if 4 in event:
                found.append((step, "graph", event[4]))
            if 7 in event:
                found.append((step, "start", None))
            for _, value in read_fields(event.get(5, b"")):
                own = dict(read_fields(value))
                tag = own[1].decode()
                found.append((step, tag, struct.unpack("<f", own[2])[0] if 2 in own else own[5]))
    return found


def read_histogram(message: bytes) -> tuple[int, float, np.ndarray]:
    """Return (values, sum, counts of the buckets)."""
    fields = dict(read_fields(message))
    number, total = (struct.unpack("<d", fields[field])[0] for field in (3, 4))
    counts = np.frombuffer(fields[7])
    assert len(np.frombuffer(fields[6])) == len(counts)
    return int(number), total, counts


def make(shards: int = 2) -> Any:
    with MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards)).scope():
        return image_model()


def fit(model: Any, folder: Path, epochs: int = 2, **options: Any) -> Any:
    x, y = image_rows()
    callbacks = [TensorBoard(folder, **options.pop("board", {})), *options.pop("callbacks", ())]
    return model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=callbacks, **options)


def test_logs_are_written_at_the_updates_of_the_model(tmp_path: Path) -> None:
    model, (x, y) = make(), image_rows()
    history = fit(model, tmp_path, validation_data=(x[:64], y[:64])).history
    events = read_events(tmp_path)
    assert events[0] == (4, "start", None) and events[1][1] == "graph"
    for name in ("loss", "val_loss", "accuracy", "val_top"):
        written = [(step, value) for step, tag, value in events if tag == name]
        assert [step for step, _ in written] == [4, 8]
        assert [value for _, value in written] == pytest.approx(history[name])
    assert [v for _, tag, v in events if tag == "learning_rate"] == pytest.approx([1e-2, 1e-2])


def test_the_learning_rate_may_follow_a_schedule(tmp_path: Path) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.5, staircase=True)
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = image_model(optimizer=keras.optimizers.SGD(schedule))
    fit(model, tmp_path)
    assert [v for _, tag, v in read_events(tmp_path) if tag == "learning_rate"] == [0.25, 0.125]


def test_logs_may_be_written_between_epochs(tmp_path: Path) -> None:
    fit(make(), tmp_path, board={"update_freq": 3, "graph": False})
    assert [step for step, tag, _ in read_events(tmp_path) if tag == "loss"] == [3, 4, 6, 8]
    assert not [tag for _, tag, _ in read_events(tmp_path) if tag == "graph"]


def test_histograms_hold_the_weights_and_the_mean_gradient(tmp_path: Path) -> None:
    """The gradient is taken from the step itself: plain SGD's update shows it."""
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = image_model(optimizer=keras.optimizers.SGD(1.0), dropout=0.0)
    x, y = image_rows()
    before = [np.copy(to_numpy(v)) for v in model.trainable_variables]
    board = TensorBoard(tmp_path, histograms=("weights", "gradients"))
    model.fit(x, y, batch_size=203, verbose=0, callbacks=[board])
    found = {tag: read_histogram(value) for _, tag, value in read_events(tmp_path) if "/" in tag}
    assert len(found) == 2 * len(before)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = to_numpy(variable)
        number, total, counts = found[f"weights/{variable.path}"]
        assert (number, counts.sum()) == (new.size, new.size)
        assert total == pytest.approx(new.sum(dtype=np.float64), abs=1e-4)
        assert found[f"gradients/{variable.path}"][1] == pytest.approx(
            (old - new).sum(dtype=np.float64), abs=1e-4
        )


def test_gradients_that_nobody_sees_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="made where replicas exchange them"):
        fit(image_model(), tmp_path, board={"histograms": "gradients"})
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        scaled = image_model(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(TrainingError, match="LossScaleOptimizer"):
        fit(scaled, tmp_path, board={"histograms": ["gradients"]})
    with pytest.raises(TrainingError, match="Received: 'biases'"):
        TensorBoard(histograms=("weights", "biases"))
    with pytest.raises(TrainingError, match="Received: 0"):
        TensorBoard(update_freq=0)


def test_a_resumed_training_replaces_what_was_written_of_steps_that_are_done_again(tmp_path: Path) -> None:
    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 7:
                raise KeyboardInterrupt

    board = {"update_freq": 1}
    with pytest.raises(KeyboardInterrupt):
        fit(make(), tmp_path / "e", board=board, callbacks=[BackupAndRestore(tmp_path / "c"), Kill()])
    fit(make(), tmp_path / "e", board=board, callbacks=[BackupAndRestore(tmp_path / "c")])
    kept: dict[int, float] = {}
    for step, tag, value in read_events(tmp_path / "e"):
        if tag == "start":
            kept = {each: loss for each, loss in kept.items() if each < step}
        elif tag == "loss":
            kept[step] = value
    assert list(kept) == [1, 2, 3, 4, 5, 6, 7, 8]
    fit(make(), tmp_path / "whole", board=board)
    assert kept == {step: loss for step, tag, loss in read_events(tmp_path / "whole") if tag == "loss"}


def test_without_a_strategy_it_writes_too(tmp_path: Path) -> None:
    fit(image_model(), tmp_path, board={"histograms": "weights", "update_freq": 2})
    assert [step for step, tag, _ in read_events(tmp_path) if tag == "loss"] == [2, 4, 6, 8]


def test_only_the_chief_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "is_chief", property(lambda self: False))
    fit(make(), tmp_path / "events")
    assert not (tmp_path / "events").exists()


def test_the_graph_has_the_layers_and_what_they_take() -> None:
    first = keras.Input((4,), name="rows")
    left = keras.layers.Dense(2, name="left")(first)
    right = keras.layers.Dense(2, name="right")(first)
    model = keras.Model(first, keras.layers.Add(name="sum")([left, right]))
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    assert describe_graph(model) == [
        GraphNode("rows", "InputLayer", []),
        GraphNode("left", "Dense", ["rows"], device),
        GraphNode("right", "Dense", ["rows"], device),
        GraphNode("sum", "Add", ["left", "right"]),
    ]


def test_tensorflow_reads_the_graph_with_its_devices(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.write_graph([GraphNode("rows", "InputLayer"), GraphNode("left", "Dense", ["rows"], "cuda:1")])
    (event,) = [e for e in tf.compat.v1.train.summary_iterator(str(file.path)) if e.graph_def]
    graph = tf.compat.v1.GraphDef.FromString(event.graph_def)
    assert [(n.name, n.op, list(n.input), n.device) for n in graph.node] == [
        ("rows", "InputLayer", [], ""),
        ("left", "Dense", ["rows"], "cuda:1"),
    ]


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(make(), tmp_path, board={"histograms": ("weights", "gradients")})
    read = accumulators.EventAccumulator(str(tmp_path))
    read.Reload()
    tags = read.Tags()
    assert {"loss", "learning_rate"} <= {*tags["scalars"], *tags.get("tensors", ())} and tags["graph"]
    assert len(tags["histograms"]) + len(tags.get("tensors", ())) >= 8


@pytest.mark.long
def test_gradients_of_devices_are_those_that_are_applied(tmp_path: Path) -> None:
    """Over two virtual devices, on TensorFlow: Mirrored and CentralStorage."""
    script = Path(__file__).parents[3] / "support" / "device_gradients.py"
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    ended = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for number in "01":
        (file,) = (tmp_path / number).glob("*tfevents*")
        assert b"gradients/" in file.read_bytes()
