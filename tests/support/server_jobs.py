"""Jobs with parameter servers, run as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.paths import Paths
from insitu.grid import import_cache

PATIENCE = 240.0
"""Seconds for a job, also beside other work."""

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
import keras
import numpy as np
import insitu

out, options, kills = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
me = insitu.context()
"""
DENSE = """
strategy = insitu.ParameterServerStrategy(min_piece_bytes=64, **options)
train = insitu.dataset("numbers").shuffle().batch(32)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu", kernel_initializer=keras.initializers.GlorotUniform(1)),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(2)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
data, batches = (train,), {}
"""
HYBRID = """
strategy = insitu.HybridStrategy(table_optimizer=keras.optimizers.Adagrad(0.5))
rng = np.random.default_rng(5)
keys = rng.integers(0, 40, (1200, 2)) * 2**40
data = keys, (keys[:, 0] // 2**40 % 2 == keys[:, 1] // 2**40 % 2).astype("float32")
batches = {"batch_size": 32, "shuffle": False}
with strategy.scope():
    given = keras.Input((2,), dtype="int64")
    hidden = keras.layers.Flatten()(insitu.layers.Embedding(8, name="table")(given))
    hidden = keras.layers.Dense(16, "relu", kernel_initializer=keras.initializers.GlorotUniform(1))(hidden)
    answer = keras.layers.Dense(1, "sigmoid", kernel_initializer=keras.initializers.GlorotUniform(2))(hidden)
    model = keras.Model(given, answer)
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
"""
TAIL = """
class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        for name, role, index, epoch, step in kills:
            injected = out / f"killed-{name}"
            if [str(me.task), self.epoch, batch] == [name, epoch, step] and not injected.exists():
                injected.write_text(f"{role}:{index}")
                os.kill(pid_of(role, index), signal.SIGKILL)


def pid_of(role, index):
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                told = (entry / "environ").read_bytes().split(b"\\0")
            except OSError:
                continue
            own = (f"INSITU_JOB_ID={me.job_id}".encode(), f"INSITU_TASK={role}:{index}".encode())
            if all(mark in told for mark in own):
                return int(entry.name)
    raise LookupError(f"{role}:{index} doesn't run")


callbacks = [insitu.BackupAndRestore(save_freq=10), Kill()]
history = model.fit(*data, **batches, epochs=4, verbose=0, callbacks=callbacks).history
weights = [w.tolist() for w in model.get_weights()]
result = {"history": history, "weights": weights, "attempt": me.incarnation, "pid": os.getpid()}
(out / f"{me.index}.json").write_text(json.dumps(result))
"""
ROWS, EPOCHS = 1200, 4


def make_cache(paths: Paths, root: Path) -> None:
    """`numbers`: two classes of points in eight dimensions, in four partitions."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, ROWS)
    points = rng.normal(size=(ROWS, 8)).astype(np.float32) + labels[:, None] * 0.8
    np.savez(root / "numbers.npz", x=points.astype(np.float32), label=labels)
    import_cache(paths, "numbers", [str(root / "numbers.npz")], partitions=4)


def run_job(
    root: Path, *options: str, kills: Any = (), script: str = DENSE, tail: str = TAIL, **strategy: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """`insitu start` of the script on two workers. What `describe` says, each worker's result, the output."""
    paths, out, folder = Paths(root / "home"), root / "out", root / "job"
    for made in (paths.home, out, folder):
        made.mkdir()
    (folder / "train.py").write_text(HEAD + script + tail)
    make_cache(paths, root)
    environment = {**os.environ, "INSITU_HOME": str(paths.home), "NO_COLOR": "1", "KERAS_BACKEND": "jax"}
    insitu = [sys.executable, "-m", "insitu"]
    arguments = ("train.py", str(out), json.dumps(strategy), json.dumps(kills))
    done = subprocess.run(
        [*insitu, "start", "--workers", "2", *options, "numbers", str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"{done.returncode}: {said}"
    describe = [*insitu, "describe", "--ledger", "--goodput", done.stderr.splitlines()[0].strip()]
    shown = subprocess.run(describe, env=environment, capture_output=True, text=True, check=True).stdout
    told = subprocess.run([*describe, "--json"], env=environment, capture_output=True, text=True, check=True)
    results = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    return json.loads(told.stdout), results, f"{said}\n{shown}"
