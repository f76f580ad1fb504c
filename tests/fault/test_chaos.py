"""A job under chaos ends as an undisturbed one: `insitu chaos` says so, and is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from insitu.grid import bring_up, import_cache
from insitu.paths import Paths

SCRIPT = """
import os, sys, time
os.environ["KERAS_BACKEND"] = "jax"
import hashlib, keras, insitu

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("images/train").shuffle().batch(48).map(lambda x, y: (x.reshape(len(x), 64) / 16, y))
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)


model.fit(train, epochs=int(sys.argv[1]), verbose=0, callbacks=[Slow(), insitu.BackupAndRestore()])
print("RESULT", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest())
"""


def chaos(root: Path, epochs: int, *options: str, patience: float) -> str:
    """What `insitu chaos` printed; fails unless its verdict is good."""
    paths = Paths(root / "home")
    (root / "images").mkdir()
    (root / "job").mkdir()
    (root / "job" / "train.py").write_text(SCRIPT)
    rng = np.random.default_rng(5)
    for label in range(4):
        np.save(root / "images" / f"{label}.npy", rng.integers(0, 16, (80 + label, 8, 8)).astype(np.uint8))
    bring_up(paths, 2)
    split = {"train": 0.9, "test": 0.1}
    source = [str(root / "images")]
    import_cache(paths, "images", source, partitions=4, backups=1, label_from_filename=True, split=split)
    command = [sys.executable, "-m", "insitu", "chaos", *options, "--patience", str(patience), "images/train"]
    done = subprocess.run(
        [*command, str(root / "job"), "train.py", str(epochs)],
        env={**os.environ, "INSITU_HOME": str(paths.home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        # The command itself gives each of its two runs no more than `patience`, and then ends it.
        timeout=2 * patience + 15,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout


def injected(told: str) -> int:
    found = re.search(r"(\d+) of \d+ faults injected", told)
    assert found is not None, told
    return int(found[1])


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_a_killed_worker_a_killed_controller_and_a_broken_checkpoint_change_nothing(tmp_path: Path) -> None:
    given = [
        "kill worker:1 1.2",
        "controller 2.1",
        "delay worker:0 3.0",
        "checkpoint 4.1",
        "kill worker:0 5.1",
    ]
    faults = [word for fault in given for word in ("--fault", fault)]
    told = chaos(tmp_path, 12, "--workers", "2", *faults, patience=200.0)
    assert injected(told) == len(given)
    assert "0 restarts of all tasks" in told


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    "options",
    [
        ("--workers", "2", "--on-loss", "replace"),
        ("--workers", "3", "--on-loss", "adopt"),
        ("--workers", "2", "--shards", "4", "--on-loss", "restart"),
    ],
)
def test_hundreds_of_faults_change_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    told = chaos(tmp_path, 2500, *options, "--faults", "334", "--seed", "1", patience=7200.0)
    assert injected(told) > 300
