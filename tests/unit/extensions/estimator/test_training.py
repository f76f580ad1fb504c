"""Training by global steps gives the bits of plain Keras, and what was saved continues."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import Batches, image_model, image_rows, in_shards, same_bits, weights

from insitu.base.errors import TrainingError
from insitu.base.paths import Paths
from insitu.base.roster import Member, Roster, write_roster
from insitu.base.spec import TaskId
from insitu.extensions.estimator import (
    BestExporter,
    EvalSpec,
    FinalExporter,
    NanLossDuringTrainingError,
    NanTensorHook,
    RunConfig,
    SessionRunHook,
    StopAtStepHook,
    TrainSpec,
    train_and_evaluate,
    training,
)
from insitu.extensions.estimator.hooks import read_global_step
from insitu.extensions.estimator.training import _has_evaluator
from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = image_rows()


def model_in(strategy: Any) -> Any:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        return image_model()


def run(model: Any, folder: Path, max_steps: int, interval: int = 5, **more: Any) -> Any:
    hooks = more.pop("hooks", ())
    eval_spec = EvalSpec(lambda: (X[:51], Y[:51]), **{"start_delay_secs": 0, "throttle_secs": 0, **more})
    config = RunConfig(folder, save_checkpoints_steps=interval)
    return train_and_evaluate(model, TrainSpec(Batches, max_steps, hooks), eval_spec, config=config)


class Heard(SessionRunHook):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps.append(self.global_step)


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_and_scores_are_those_of_fit(tmp_path: Path, shards: int) -> None:
    def strategy() -> Any:
        return MultiWorkerMirroredStrategy(context=in_shards(tuple(range(shards)), shards))

    plain = model_in(strategy()) if shards > 1 else image_model_plain()
    plain.fit(Batches(), epochs=2, shuffle=False, verbose=0)  # 14 steps
    model, heard = model_in(strategy()), Heard()
    scores, exports = run(model, tmp_path, 14, hooks=[heard])
    assert heard.steps == list(range(1, 15)) and exports == []
    assert same_bits(weights(model), weights(plain))
    expected = plain.evaluate(X[:51], Y[:51], verbose=0, return_dict=True)
    assert scores == pytest.approx({**expected, "global_step": 14}, rel=1e-6)


def image_model_plain() -> Any:
    keras.utils.set_random_seed(7)
    return image_model()


def test_evaluations_come_behind_checkpoints_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model_in(OneDeviceStrategy()), tmp_path, 12)
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation of" in line]
    assert [line.split()[4] for line in lines] == ["5", "10", "12"]
    run(model_in(OneDeviceStrategy()), tmp_path / "b", 12, throttle_secs=1e6)
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation of" in line]
    assert [line.split()[4] for line in lines] == ["5", "12"]


@pytest.mark.parametrize("batches", [4, 5])
def test_data_of_unknown_length_is_read_again(tmp_path: Path, batches: int) -> None:
    tf = pytest.importorskip("tensorflow")
    signature = (tf.TensorSpec((16, 8, 8, 1)), tf.TensorSpec((16,), tf.int64))

    def read() -> Any:
        yield from (
            (X[16 * index : 16 * index + 16], Y[16 * index : 16 * index + 16]) for index in range(batches)
        )

    def data() -> Any:
        return tf.data.Dataset.from_generator(read, output_signature=signature)

    model, heard = model_in(OneDeviceStrategy()), Heard()
    spec = EvalSpec(data, None, start_delay_secs=0, throttle_secs=0)
    config = RunConfig(tmp_path, save_checkpoints_steps=2)
    train_and_evaluate(model, TrainSpec(data, 11, [heard]), spec, config=config)
    assert heard.steps == list(range(1, 12))


def test_evaluations_change_nothing_of_the_training(tmp_path: Path) -> None:
    often, never = (model_in(MultiWorkerMirroredStrategy()) for _ in range(2))
    run(often, tmp_path / "a", 9, interval=2)
    run(never, tmp_path / "b", 9, interval=2, start_delay_secs=1e6)
    assert same_bits(weights(often), weights(never))


@pytest.mark.parametrize("is_restored", [False, True])
def test_checkpoints_come_by_steps_wherever_the_data_ends(tmp_path: Path, is_restored: bool) -> None:
    """Passes of 7 batches, a checkpoint each 10 steps: 10, 20, and the end. The orders of arrays are those of
    fit."""
    plain = model_in(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)))
    plain.fit(X[:80], Y[:80], batch_size=32, epochs=8, shuffle=True, verbose=0)  # 3 steps in each
    saved: list[int] = []

    class Saved(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            saved.append(read_global_step(self.model))

    def train(hooks: list[Any]) -> Any:
        model = model_in(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)))
        spec = TrainSpec(lambda: (X[:80], Y[:80]), 24, [Saved(), *hooks])
        config = RunConfig(tmp_path, save_checkpoints_steps=10)
        train_and_evaluate(model, spec, EvalSpec(Batches, 1), config=config)
        return model

    if is_restored:
        with pytest.raises(ZeroDivisionError):
            train([FailAt(15)])
        assert saved == [10]
    model = train([])
    assert saved == [10, 20, 24]
    assert same_bits(weights(model), weights(plain))


@pytest.mark.parametrize("is_of_job", [False, True])
def test_a_training_that_a_hook_has_ended_is_followed_by_others(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_job: bool
) -> None:
    if is_of_job:
        job = Paths(home).job("j-1")
        job.root.mkdir(parents=True)
        job.secret.write_bytes(b"s" * 32)
        for name, value in {"JOB_ID": "j-1", "TASK": "worker:0", "SHARDS": "0/1"}.items():
            monkeypatch.setenv(f"INSITU_{name}", value)
        cluster = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))

    def script() -> list[int]:
        monkeypatch.setattr(training, "_TRAININGS", itertools.count())
        found = []
        for steps, hooks in [(50, [StopAtStepHook(4)]), (50, [StopAtStepHook(4)]), (20, []), (23, [])]:
            model = model_in(OneDeviceStrategy())
            trainer = training.check_trained(model)
            spec = TrainSpec(Batches, steps, hooks)
            training.train(trainer, spec, RunConfig(tmp_path), None, series=0)
            found.append(read_global_step(model))
        return found

    assert script() == [4, 8, 20, 23]
    # A job starts its script again: what was done isn't done again. Elsewhere a hook ends a further training.
    assert script() == ([23] * 4 if is_of_job else [27, 31, 31, 31])


class FailAt(SessionRunHook):
    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if self.global_step == self._step:
            raise ZeroDivisionError("injected")


def test_a_training_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    whole = model_in(MultiWorkerMirroredStrategy())
    run(whole, tmp_path / "whole", 12)
    with pytest.raises(ZeroDivisionError):
        run(model_in(MultiWorkerMirroredStrategy()), tmp_path / "failed", 12, hooks=[FailAt(9)])
    again, heard = model_in(MultiWorkerMirroredStrategy()), Heard()
    run(again, tmp_path / "failed", 12, hooks=[heard])
    assert heard.steps == [6, 7, 8, 9, 10, 11, 12]
    assert same_bits(weights(again), weights(whole))


def test_max_steps_is_the_only_stop_and_may_be_raised(tmp_path: Path) -> None:
    model = model_in(MultiWorkerMirroredStrategy())
    run(model, tmp_path, 6)
    assert read_global_step(model) == 6
    before = [w.copy() for w in weights(model)]
    run(model, tmp_path / "other", 6)  # this model has had them
    later = model_in(MultiWorkerMirroredStrategy())
    run(later, tmp_path, 4)  # the checkpoint has had more
    assert same_bits(weights(model), before) and same_bits(weights(later), before)
    more, heard = model_in(MultiWorkerMirroredStrategy()), Heard()
    run(more, tmp_path, 9, hooks=[heard])
    assert heard.steps == [7, 8, 9] and read_global_step(more) == 9


def test_exports_predict_as_the_model_that_was_scored(tmp_path: Path) -> None:
    model = model_in(MultiWorkerMirroredStrategy())
    _, published = run(model, tmp_path, 7, exporters=[BestExporter(), FinalExporter()])
    assert published[-1] == tmp_path / "export" / "final" / "00000007.keras"
    loaded = keras.models.load_model(published[-1])
    assert np.allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    assert (tmp_path / "export" / "best" / "best.json").exists()


def test_what_cannot_be_trained_so_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"compiled in a strategy's scope. Received: "):
        run(image_model(), tmp_path, 3)
    with OneDeviceStrategy().scope():
        model = image_model(steps_per_execution=2)
    with pytest.raises(TrainingError, match="steps_per_execution=2"):
        run(model, tmp_path, 3)
    spec = EvalSpec(Batches)
    with pytest.raises(TrainingError, match="Received: a generator"):
        model = model_in(OneDeviceStrategy())
        train_and_evaluate(model, TrainSpec(lambda: (row for row in X), 3), spec, config=RunConfig(tmp_path))


# In the evaluator of a job


def test_the_evaluator_scores_what_the_workers_save_and_exports_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    trained = model_in(MultiWorkerMirroredStrategy())
    _, alone = run(trained, folder, 6, exporters=FinalExporter("alone"))
    job = Paths(home).job("j-1")
    job.root.mkdir(parents=True)
    job.secret.write_bytes(b"s" * 32)
    evaluator = Member(TaskId("evaluator", 0), 1, "localhost:3")
    write_roster(job.roster, Roster(2, (), (evaluator,), training_over=True))
    config = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "evaluator", "index": 0}}
    for name, value in {"JOB_ID": "j-1", "TASK": "evaluator:0", "SHARDS": "/1"}.items():
        monkeypatch.setenv(f"INSITU_{name}", value)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    from insitu.base.context import context

    assert _has_evaluator(context())
    for _ in range(2):  # the second incarnation exports again what the first may not have
        scored = model_in(MultiWorkerMirroredStrategy())
        scores, published = run(scored, folder, 6, exporters=FinalExporter())
        assert [path.name for path in published] == ["00000006.keras"] == [path.name for path in alone]
    expected = trained.evaluate(X[:51], Y[:51], verbose=0, return_dict=True)
    assert scores == pytest.approx({**expected, "global_step": 6}, rel=1e-6)


def test_no_checkpoint_is_written_of_a_loss_that_isnt_finite(tmp_path: Path) -> None:
    class Broken(Batches):
        is_broken = True

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return (x * np.nan if index == 6 and self.is_broken else x), y

    def make() -> Any:
        with OneDeviceStrategy().scope():  # without relu, which may take NaN for 0
            model = keras.Sequential(
                [keras.Input(X.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(3)]
            )
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    data = Broken()
    eval_spec = EvalSpec(lambda: (X[:51], Y[:51]), start_delay_secs=0, throttle_secs=0)
    config = RunConfig(tmp_path, save_checkpoints_steps=5)
    with pytest.raises(NanLossDuringTrainingError, match=r"up to step 10\. No checkpoint"):
        train_and_evaluate(make(), TrainSpec(lambda: data, 20), eval_spec, config=config)
    data.is_broken = False  # mended: it continues from the checkpoint before
    heard = Heard()
    model = make()
    spec = TrainSpec(lambda: data, 20, [heard])
    scores, _ = train_and_evaluate(model, spec, eval_spec, config=config)
    assert np.isfinite(scores["loss"]) and read_global_step(model) == 20
    # Who asks for an end without an error gets it.
    data.is_broken = True
    spec = TrainSpec(lambda: data, 30, [NanTensorHook(fail_on_nan_loss=False)])
    train_and_evaluate(model, spec, eval_spec, config=config)
    assert read_global_step(model) < 30


@pytest.mark.parametrize(
    ("interval", "is_known"),
    [
        *((3, False), (7, False), (7, True), (100, False)),
        *(pytest.param(interval, True, marks=pytest.mark.slow) for interval in (3, 100)),
    ],
)
def test_without_max_steps_a_training_ends_with_its_data(
    tmp_path: Path, interval: int, is_known: bool
) -> None:
    tf = pytest.importorskip("tensorflow")

    def data() -> Any:
        batches = tf.data.Dataset.from_tensor_slices((X[:56], Y[:56])).batch(8)  # 7 steps
        return batches if is_known else batches.filter(lambda x, y: True)

    model = model_in(OneDeviceStrategy())
    spec, config = EvalSpec(Batches, 1), RunConfig(tmp_path, save_checkpoints_steps=interval)
    for _ in range(2):
        scores, _ = train_and_evaluate(model, TrainSpec(data), spec, config=config)
    assert scores is not None and scores["global_step"] == read_global_step(model) == 14
