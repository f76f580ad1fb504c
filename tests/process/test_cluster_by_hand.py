"""Two processes with TF_CONFIG by hand train as one cluster: to the bits of `insitu start - ...`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_addresses
from job_runs import Insitu, insitu_at

SCRIPT = """
import hashlib
import keras
import numpy as np
import insitu

rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 4)).astype("float32"), rng.normal(size=(50, 1)).astype("float32")


def train(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    weights = b"".join(w.tobytes() for w in model.get_weights())
    print("RESULT", strategy.num_replicas_in_sync, hashlib.sha256(weights).hexdigest())


train(insitu.MultiWorkerMirroredStrategy())
me = insitu.context()
if me.is_chief:
    both_shards = insitu.Context(me.paths, shards=(0, 1), num_shards=2)
    train(insitu.MultiWorkerMirroredStrategy(context=both_shards))
"""


def results(text: str) -> set[str]:
    return {line.partition("RESULT ")[2] for line in text.splitlines() if "RESULT" in line}


def start_by_hand(insitu: Insitu) -> list[tuple[str, str]]:
    """Return what two processes of one cluster print, to stdout and to stderr."""
    addresses = free_addresses(2)
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(insitu.folder / "train.py")],
                env={**insitu.environment, "TF_CONFIG": json.dumps(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [process.communicate(timeout=250) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ended
    return ended


@pytest.mark.long
def test_two_shells_train_as_one_cluster(tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.script(SCRIPT)
        ended = start_by_hand(insitu)
    assert all("by TF_CONFIG, at 127.0.0.1:" in err for _, err in ended)
    found = [results(out) for out, _ in ended]
    # The chief's second training is of one process with both shards.
    assert found[0] == found[1] and len(found[0]) == 1 and found[0].pop().startswith("2 "), ended


@pytest.mark.slow
def test_a_job_without_a_cache_trains_to_the_same_bits(tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.script(SCRIPT)
        expected = results("".join(out for out, _ in start_by_hand(insitu)))
        done = insitu.run("start", "--workers", "2", "--threads", "1", "-", str(insitu.folder), "train.py")
        assert results(done.stdout) == expected
        job_id = done.stderr.splitlines()[0]
        assert job_id.startswith("job-")
        described = insitu.run("describe", "--ledger", job_id)
        assert "none, the script brings its own data" in described.stdout


def test_a_missing_partner_is_named(tmp_path: Path) -> None:
    task = {"cluster": {"worker": free_addresses(2)}, "task": {"type": "worker", "index": 1}}
    done = subprocess.run(
        [sys.executable, "-c", "import insitu; insitu.MultiWorkerMirroredStrategy().reduce('sum', 1.0)"],
        env={**os.environ, "TF_CONFIG": json.dumps(task), "INSITU_STALL_TIMEOUT": "0.5"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode != 0 and "JoinTimeout" in done.stderr and "worker:0" in done.stderr
