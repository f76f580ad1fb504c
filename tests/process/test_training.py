"""Real jobs: the same bits whoever runs the shards and dies, every row once, data read in place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_jobs import TrainingJobs, assert_every_row_once

from insitu.base.paths import Paths
from insitu.grid import import_cache


@pytest.mark.timeout(400)
def test_two_workers_and_one_over_both_shards_end_with_the_same_bits(two_workers: Any):
    jobs, job, results = two_workers
    assert len(results) == 2
    assert results[0] == results[1]
    assert results[0]["last"]["loss"] < 1.3
    assert_every_row_once(job, epochs=4)
    reads = {task["task"]: task["reads"] for task in job["task_list"]}
    assert all(r["remote_bytes"] == 0 and r["local_bytes"] > 0 for r in reads.values())
    # Shards of 3 partitions each: the rows of all four epochs, none of them the other worker's.
    assert sum(task["progress"]["rows"] for task in job["task_list"]) == sum(
        epoch["counted"] for epoch in job["ledger"]
    )
    other, alone = jobs.run("--workers", "1", "--shards", "2", "--threads", "1")
    assert alone == results[:1]
    assert_every_row_once(other, epochs=4)
    reads = other["task_list"][0]["reads"]
    assert reads["remote_bytes"] > 0
    assert reads["local_bytes"] > 0


@pytest.mark.timeout(400)
def test_sigkill_changes_nothing(two_workers: Any):
    jobs, _, undisturbed = two_workers
    options = ("--workers", "2", "--threads", "1", "--standby", "1")
    job, results = jobs.run(*options, backup=3, kill_at=["worker:1", 2, 4])
    assert jobs.injected.read_text() == "worker:1"
    (recovery,) = job["recoveries"]
    assert (recovery["how"], recovery["tasks"], recovery["generation"]) == ("replaced", ["worker:1"], 2)
    assert "SIGKILL" in recovery["text"] and recovery["seconds"] > 0
    assert job["attempt"] == 1
    assert [task["attempt"] for task in job["task_list"]] == [1, 2]
    assert results == undisturbed
    assert_every_row_once(job, epochs=4)
    survivor, replacement = (task["progress"]["rows"] for task in job["task_list"])
    # The survivor fed all its rows once, the replacement none of the steps that were done.
    assert survivor + replacement < 4 * job["ledger"][0]["expected"]
    assert replacement < survivor / 2


SCRIPT = """
import keras, sys, insitu
data = insitu.dataset("numbers").shuffle(seed=1).batch(16).map(lambda x, y: (x, y))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(data, epochs=2, verbose=0, validation_data=data, class_weight={0: 1.0, 1: 2.0}).history
assert len(history["loss"]) == 2 and history["val_loss"][0] > 0
rows = sum(len(x) for x, y in data)
assert rows == 75 and model.predict(data, verbose=0).shape == (75, 1), rows
print(keras.backend.backend(), "OK")
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax", pytest.param("torch", marks=pytest.mark.torch)])
def test_plain_keras_takes_a_dataset(tmp_path: Path, home: Path, backend: str):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "n.npz", x=rng.normal(size=(75, 4)).astype("f4"), label=rng.integers(0, 2, 75))
    import_cache(Paths(home), "numbers", [str(tmp_path / "n.npz")], partitions=3)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert f"{backend} OK" in done.stdout, done.stderr[-3000:]


def test_the_same_script_runs_on_its_own(tmp_path: Path):
    jobs = TrainingJobs(tmp_path, nodes=2)
    done = subprocess.run(
        [sys.executable, "train.py", str(tmp_path), "1", "null", "cache"],
        cwd=jobs.folder,
        env={**os.environ, "INSITU_HOME": str(jobs.paths.home)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "0.json").exists()
