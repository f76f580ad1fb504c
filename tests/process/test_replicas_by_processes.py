"""A script on PyTorch that runs once for each device: failures, and what stays behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

SCRIPT = """
import os, sys
from pathlib import Path
import insitu
insitu.config.set_virtual_devices(2)
import keras, numpy as np

class Tells(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        me = insitu.context()
        if sys.argv[1] == "fails" and batch == 1 and not me.is_chief:
            raise RuntimeError("the second device is on fire")
        if sys.argv[1] == "waits" and batch == 1:
            Path(f"part-{me.index}").write_text(str(os.getpid()))
            os.rename(f"part-{me.index}", f"pid-{me.index}")

if sys.argv[1] == "early" and not insitu.context().is_chief:
    sys.exit("no data here")
strategy = insitu.MirroredStrategy()
print("replicas", strategy.num_replicas_in_sync, flush=True)
if sys.argv[1] == "early":
    strategy.group()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
epochs = 10**6 if sys.argv[1] == "waits" else 1
model.fit(np.zeros((40, 4)), np.zeros(40), batch_size=10, verbose=0, epochs=epochs, callbacks=[Tells()])
"""


@contextlib.contextmanager
def started(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py", how],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "torch", "INSITU_STALL_TIMEOUT": "50"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_others_are_silent(tmp_path: Path):
    with started(tmp_path, "trains") as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert out == "replicas 2\n"


@pytest.mark.parametrize(
    ("how", "said"), [("fails", "RuntimeError: the second device is on fire"), ("early", "no data here")]
)
def test_a_failure_of_one_ends_all_and_is_told(tmp_path: Path, how: str, said: str):
    with started(tmp_path, how) as process:
        _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    last = err[err.rindex("TrainingError: ") :]
    assert "The replica on cpu:1" in last
    assert said in last


def test_the_others_end_with_the_one_that_was_started(tmp_path: Path):
    with started(tmp_path, "waits") as process:
        paths = [tmp_path / f"pid-{index}" for index in range(2)]
        deadline = time.monotonic() + 150
        while not all(path.exists() for path in paths):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first, second = (int(path.read_text()) for path in paths)
        assert first == process.pid
    while is_running(second):
        assert time.monotonic() < deadline + 10
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
