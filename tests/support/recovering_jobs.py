"""Workers of one job whose places a stand-in for the controller gives out: it replaces who dies, at once.

So the train side of a recovery is tested alone: all that the two sides share is the roster.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.paths import JobPaths, Paths
from insitu.base.roster import Member, Roster, write_roster
from insitu.base.spec import TaskId
from insitu.exchange.rendezvous import parse_address
from insitu.grid import bring_up, import_cache

PATIENCE = 280.0

SCRIPT = """
import hashlib, json, os, signal, sys, time
from pathlib import Path
import keras
import numpy as np
import insitu
from insitu.train.checkpoint import store as checkpoint
from insitu.train.elastic.progress_reporter import ProgressReporter

out, rules = Path(sys.argv[1]), json.loads(sys.argv[2])
me = insitu.context()
fits = 0
life = f"{me.task}.{me.incarnation}"


def die_at(place, *where):
    for rule in rules:
        if rule == [life, place, *where, *([fits] if len(rule) > 4 else [])]:
            deadline = time.monotonic() + 30
            while me.memory_checkpoint and not [*me.job.memory.glob("worker-1/*/epoch-*")]:
                assert time.monotonic() < deadline, "no checkpoint came to be in memory"
                time.sleep(0.01)
            (out / f"injected-{life}").write_text(place)
            os.kill(os.getpid(), signal.SIGKILL)


report_place = ProgressReporter.report_place
def report_place_and_die(self, place):
    report_place(self, place)
    die_at(place, self._position.epoch, self._position.step)
ProgressReporter.report_place = report_place_and_die

write = checkpoint._LocalFolder.write
def write_half(self, name, buffer, state):
    def half(path, pages, size):
        path.write_bytes(pages[: size // 2])
        die_at("writing", name)
        whole(path, pages, size)
    checkpoint.write_pages = half
    write(self, name, buffer, state)
whole = checkpoint.write_pages
checkpoint._LocalFolder.write = write_half

with (out / f"began-{life}").open("w") as file:
    file.write(str(os.getpid()))
keras.utils.set_random_seed(3)
strategy = insitu.MultiWorkerMirroredStrategy()
layers = keras.layers


def prepare(x, y):
    ids = x[:, 0, 0].astype("int32") * 32 + x[:, 0, 1]
    return x.reshape(len(x), 64).astype("float32") / 16, np.stack([y, ids, ids * ids % 1009], 1)


class SumOf(keras.metrics.Metric):
    # One column of what rows say of themselves: exact, since the sums are small.

    def __init__(self, column, name):
        super().__init__(name=name)
        self.column = column
        self.total = self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = keras.ops.cast(y_true[:, self.column], "float32")
        self.total.assign_add(keras.ops.sum(values))

    def result(self):
        return self.total + 0


train = insitu.dataset("images/train").shuffle().batch(48).map(prepare)
held_out = insitu.dataset("images/test").batch(24).map(prepare)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(16, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(4),
        ]
    )

    def loss(truth, predicted):
        return keras.losses.sparse_categorical_crossentropy(truth[:, 0], predicted, from_logits=True)

    def accuracy(truth, predicted):
        return keras.metrics.sparse_categorical_accuracy(truth[:, 0], predicted)

    counts = [SumOf(1, "ids"), SumOf(2, "squares")]
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
    model.compile(optimizer, loss, metrics=[accuracy, *counts])


def digest(variables):
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables)).hexdigest()


class Watching(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.heard = []
        self.epoch = -1

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append((self.epoch, batch, float(logs["loss"])))

    def on_test_batch_end(self, batch, logs=None):
        die_at("tested", self.epoch, batch)

    def on_epoch_end(self, epoch, logs=None):
        self.heard.append((epoch, "end", sorted(logs)))
        die_at("epoch end", epoch)


watching = Watching()
callbacks = [
    watching,
    keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.3),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    keras.callbacks.EarlyStopping("val_loss", patience=4, restore_best_weights=True),
    keras.callbacks.CSVLogger(str(out / "log.csv")),
    insitu.BackupAndRestore(),
]
first = model.fit(train, epochs=3, validation_data=held_out, verbose=0, callbacks=callbacks)
die_at("between")
fits = 1
evaluated = model.evaluate(held_out, verbose=0)
second = model.fit(train, epochs=2, verbose=0)
predicted = model.predict(held_out, verbose=0)
result = {
    "weights": digest(model.weights),
    "slots": digest(model.optimizer.variables),
    "history": first.history,
    "epochs": [first.epoch, second.epoch],
    "second": second.history,
    "heard": watching.heard,
    "evaluated": evaluated,
    "predicted": hashlib.sha256(np.asarray(predicted).tobytes()).hexdigest(),
}
(out / f"ended-{me.task}").write_text(f"{life} {os.getpid()}")
(out / f"result-{me.index}.json").write_text(json.dumps(result))
"""


def make_cache(paths: Paths, root: Path) -> None:
    """The caches images/train and images/test. Two pixels of each image hold its number."""
    source = root / "images"
    source.mkdir()
    rng = np.random.default_rng(5)
    numbers = 0
    for label in range(4):
        images = rng.integers(0, 9, (110 + label, 8, 8)).astype(np.uint8)
        images[:, label : label + 3, label : label + 3] += 6
        images[:, 0, 0], images[:, 0, 1] = np.divmod(numbers + np.arange(len(images)), 32)
        numbers += len(images)
        np.save(source / f"{label}.npy", images)
    bring_up(paths, 2)
    split = {"train": 0.8, "test": 0.2}
    import_cache(paths, "images", [str(source)], partitions=6, label_from_filename=True, split=split)


class RecoveringJob:
    """One job of `workers` workers. `rules` say who dies where: [life, place, epoch, step].

    With `disk_lost` the checkpoints on disk go with each task that dies; others are kept in memory.
    """

    def __init__(
        self,
        root: Path,
        paths: Paths,
        name: str,
        workers: int,
        rules: Sequence[Any] = (),
        disk_lost: bool = False,
        backend: str = "tensorflow",
    ) -> None:
        self._disk_lost = disk_lost
        self._backend = backend
        self.out = root / name
        self.out.mkdir()
        self.paths = paths
        self.job: JobPaths = paths.job(name)
        self.job.root.mkdir(parents=True)
        self.job.secret.write_bytes(b"the secret of a test")
        self._name = name
        self._script = root / "train.py"
        self._script.write_text(SCRIPT)
        self._rules = list(rules)
        self.roster = Roster(
            1, tuple(Member(TaskId("worker", w), 1, free_address(), (w,)) for w in range(workers))
        )
        self._processes: dict[TaskId, subprocess.Popen[bytes]] = {}
        self.ended: dict[TaskId, int] = {}

    def run(self) -> list[dict[str, Any]]:
        """Every worker's result, by index. Fails where one ends with an error."""
        write_roster(self.job.roster, self.roster)
        try:
            for member in self.roster.members:
                self._start(member)
            deadline = time.monotonic() + PATIENCE
            while self._processes:
                if time.monotonic() > deadline:
                    raise AssertionError(f"not done in {PATIENCE:g} s: {self.told()}")
                self._look()
                time.sleep(0.01)
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()
            shutil.rmtree(self.job.memory, ignore_errors=True)
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("result-*.json"))]

    def told(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-3000:]}" for p in sorted(self.out.glob("*.log")))

    def _look(self) -> None:
        dead = []
        for task, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self._processes[task]
            self.ended[task] = code
            if code == -signal.SIGKILL:
                dead.append(task)
            elif code != 0:
                raise AssertionError(f"{task} ended with {code}: {self.told()}")
        if dead:
            if self._disk_lost:
                shutil.rmtree(self.job.checkpoints, ignore_errors=True)
            self._replace(dead)

    def _replace(self, dead: list[TaskId]) -> None:
        members = tuple(
            Member(m.task, m.incarnation + 1, free_address(), m.shards) if m.task in dead else m
            for m in self.roster.members
        )
        self.publish(Roster(self.roster.generation + 1, members))
        for member in members:
            if member.task in dead:
                self._start(member)

    def publish(self, roster: Roster) -> None:
        self.roster = roster
        write_roster(self.job.roster, roster)

    def _start(self, member: Member) -> None:
        index = member.task.index
        workers = [m.address for m in self.roster.members]
        environment = {
            **os.environ,
            "KERAS_BACKEND": self._backend,
            "INSITU_HOME": str(self.paths.home),
            "INSITU_JOB_ID": self._name,
            "INSITU_CACHE": "images/train",
            "INSITU_TASK": str(member.task),
            "INSITU_SHARDS": f"{','.join(map(str, member.shards))}/{len(workers)}",
            "INSITU_SEED": "3",
            "INSITU_ATTEMPT": str(member.incarnation),
            "INSITU_GENERATION": str(self.roster.generation),
            "INSITU_STALL_TIMEOUT": "60",
            "INSITU_MEMORY_CHECKPOINT": "1" if self._disk_lost else "",
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            ),
        }
        with (self.out / f"{member.task}.{member.incarnation}.log").open("wb") as log:
            self._processes[member.task] = subprocess.Popen(
                [sys.executable, str(self._script), str(self.out), json.dumps(self._rules)],
                env=environment,
                stdout=log,
                stderr=log,
            )


def free_address() -> str:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    return "{}:{}".format(*parse_address(f"{host}:{port}"))
