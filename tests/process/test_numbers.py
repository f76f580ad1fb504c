"""What a job measures of itself, through the loss of a task and of all tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu, insitu_at

from insitu.cluster import read_curve
from insitu.spec import TaskId
from insitu.task_samples import read_samples

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
