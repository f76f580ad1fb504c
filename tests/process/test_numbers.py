"""What a job measures of itself, through the loss of a task and of all tasks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu, insitu_at

from insitu.base.measure.task_samples import read_samples
from insitu.base.spec import TaskId
from insitu.cluster import read_curve
from insitu.cluster.job_files import is_locked, read_supervisor

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import keras
import numpy as np

import insitu

kill, folder, me = sys.argv[1], Path(sys.argv[2]), insitu.context()


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        first = not (folder / f"killed-{me.index}").exists()
        if first and self.model.optimizer.iterations == 75 and (kill == "all" or me.index == int(kill)):
            (folder / f"killed-{me.index}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


rng = np.random.default_rng(0)
x = rng.normal(size=(320, 4)).astype("float32")
y = x.sum(1, keepdims=True)
with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
callbacks = [insitu.BackupAndRestore(), Kill(), insitu.StepLog(30), insitu.TensorBoard()]
model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y), callbacks=callbacks)
"""


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as made:
        made.script(SCRIPT)
        yield made


def run(insitu: Insitu, tmp_path: Path, kill: str, *options: str) -> tuple[Any, str]:
    """Return (what `describe --goodput` says, the output of the job)."""
    started = insitu.start(
        "--workers", "2", "--threads", "1", *options, command=("train.py", kill, str(tmp_path))
    )
    assert list(tmp_path.glob("killed-*"))
    described = insitu.run("describe", started.job_id, "--goodput", "--json")
    return json.loads(described.stdout), insitu.output(started.job_id)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kill", "lost"), [("1", "recovery"), pytest.param("all", "redone", marks=pytest.mark.slow)]
)
@pytest.mark.long
def test_a_job_accounts_for_its_time_and_keeps_its_curve(
    insitu: Insitu, tmp_path: Path, kill: str, lost: str
) -> None:
    described, output = run(insitu, tmp_path, kill, "--max-restarts", "3")
    account = described["goodput"]
    assert account["wall"] == pytest.approx(described["ended"] - described["created"], rel=0.01)
    assert sum(account["seconds"].values()) == pytest.approx(account["wall"], rel=0.01)
    for task in account["tasks"]:
        assert sum(task["seconds"].values()) == pytest.approx(account["wall"], rel=0.01)
    assert account["seconds"]["callbacks"] > 1.0  # they sleep 120 times for 20 ms
    assert account["seconds"][lost] > 0.0
    assert {"import", "compile", "gradient", "exchange", "evaluation"} <= account["seconds"].keys()
    for task in described["task_list"]:
        assert task["rates"]["memory"] > 10_000_000 and task["rates"]["step_seconds"] > 0.01
    job = insitu.job(described["job_id"])
    curve = read_curve(job)
    updates = [point.updates for point in curve]
    assert updates == sorted(set(updates)) and updates[-1] == 120
    assert curve[-1].metrics.keys() == {"loss", "val_loss"}
    attempts = {sample.attempt for sample in read_samples(job.samples(TaskId("worker", 1)))}
    assert len(attempts) == 2 and min(attempts) == 1
    steps = [
        int(line.split("step ", 1)[1].split(",")[0]) for line in output.splitlines() if "ms/batch" in line
    ]
    assert set(steps) == {30, 60, 90, 120} and steps[-1] == 120
    assert list(job.summaries(TaskId("worker", 0)).glob("events.out.tfevents.*"))


SLEEPY = """
import sys, time

import keras

import insitu

me = insitu.context()


class Slow(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        time.sleep(0.5)

    on_epoch_begin = on_train_end = lambda self, *args, **more: time.sleep(0.5)

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(2.0 if me.index == 0 else 0.0)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(sys.argv[1]))


with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = __import__("numpy").ones((64, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[insitu.BackupAndRestore(), Slow()])
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_second_of_callbacks_is_theirs_and_who_waits_for_them_waits(insitu: Insitu) -> None:
    insitu.script(SLEEPY)
    started = insitu.start("--workers", "2", "--threads", "1", command=("train.py", "0"))
    described = insitu.run("describe", started.job_id, "--goodput", "--json")
    account = json.loads(described.stdout)["goodput"]
    chief, other = (task["seconds"] for task in account["tasks"])
    assert 6.0 <= chief["callbacks"] < 7.5  # begin and end, twice an epoch's begin and end
    assert 2.0 <= other["callbacks"] < 3.5
    assert other["wait"] > 3.0  # for the chief, at the end of each epoch
    assert chief["gradient"] < 1.0 and other["gradient"] < 1.0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_of_which_all_processes_die_keeps_its_account(insitu: Insitu) -> None:
    insitu.script(SLEEPY)
    name = insitu.detach("--workers", "1", "--standby", "0", "--threads", "1", command=("train.py", "0.5"))
    job, chief = insitu.job(name), TaskId("worker", 0)
    while not any(each.seconds.get("callbacks", 0.0) > 2.0 for each in read_samples(job.samples(chief))):
        assert is_locked(job.controller)
        time.sleep(0.05)
    supervisor = read_supervisor(job.controller)
    assert supervisor is not None
    killed = time.time()
    os.kill(supervisor.pid, signal.SIGKILL)
    while is_locked(job.controller):
        time.sleep(0.05)
    job.output.touch()
    os.utime(job.journal)  # what a copied folder looks like
    before = json.loads(insitu.run("describe", name, "--goodput", "--json").stdout)
    assert before["ended"] - killed == pytest.approx(0.0, abs=6.0) and before["ended"] <= time.time()
    assert before["goodput"]["wall"] == pytest.approx(before["ended"] - before["created"])
    resumed = time.time()
    insitu.run("resume", name)
    after = json.loads(insitu.run("describe", name, "--goodput", "--json").stdout)
    account, seconds = after["goodput"], after["goodput"]["seconds"]
    assert after["state"] == "finished"
    assert sum(seconds.values()) == pytest.approx(account["wall"], rel=0.01)
    assert seconds["away"] >= resumed - before["ended"] - 0.01
    assert seconds["import"] == pytest.approx(before["goodput"]["seconds"]["import"], abs=0.01)
    # Eight steps of half a second, twice, but for those before the last checkpoint.
    assert seconds["callbacks"] >= before["goodput"]["seconds"]["callbacks"] - 0.01
    assert "idle" not in seconds
