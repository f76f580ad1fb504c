"""Two processes with TF_CONFIG by hand train as one cluster: to the bits of `insitu start - ...`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from free_ports import free_addresses
from job_runs import insitu_at

SCRIPT = """
import hashlib
import keras
import numpy as np
import insitu

keras.utils.set_random_seed(1)
strategy = insitu.MultiWorkerMirroredStrategy()
rng = np.random.default_rng(0)
x, y = rng.normal(size=(50, 4)).astype("float32"), rng.normal(size=(50, 1)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
weights = b"".join(w.tobytes() for w in model.get_weights())
print("RESULT", strategy.num_replicas_in_sync, hashlib.sha256(weights).hexdigest())
"""


def results(text: str) -> set[str]:
    return {line.partition("RESULT ")[2] for line in text.splitlines() if "RESULT" in line}


def test_two_shells_train_as_one_cluster(tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.script(SCRIPT)
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
            ended = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], ended
        found = results("".join(out for out, _ in ended))
        assert len(found) == 1 and found.pop().startswith("2 "), ended
        assert all("by TF_CONFIG, at 127.0.0.1:" in err for _, err in ended)
        expected = results("".join(out for out, _ in ended))
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
        timeout=100,
    )
    assert done.returncode != 0 and "JoinTimeout" in done.stderr and "worker:0" in done.stderr
