"""Jobs of `train_and_evaluate` under each strategy, in which one task of each role is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_jobs import make_cache

from insitu.base.paths import Paths

PATIENCE = 300.0
"""Seconds for a job, also beside other work."""
MAX_STEPS, INTERVAL, ROWS, BATCH = 75, 10, 1200, 40
SCRIPT = '''
import hashlib, json, os, signal, sys
from pathlib import Path
import keras
import numpy as np
import insitu
from insitu import estimator as est

out, name, kills, form = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
me = insitu.context()
keras.utils.set_random_seed(me.seed)
MADE = {
    "one device": lambda: insitu.OneDeviceStrategy(),
    "mirrored": lambda: insitu.MirroredStrategy(["cpu:0", "cpu:1"]),
    "ring": lambda: insitu.MultiWorkerMirroredStrategy("ring"),
    "xla": lambda: insitu.MultiWorkerMirroredStrategy("xla"),
    "central storage": lambda: insitu.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
    "sync": lambda: insitu.ParameterServerStrategy(mode="sync", min_piece_bytes=64),
    "async": lambda: insitu.ParameterServerStrategy(mode="async", min_piece_bytes=64),
    "bounded": lambda: insitu.ParameterServerStrategy(mode="bounded", min_piece_bytes=64),
    "hybrid": lambda: insitu.HybridStrategy(),
    "layout map": lambda: insitu.ModelParallelStrategy(
        {".*hidden.*kernel": (None, "model")}, mesh={"data": 1, "model": 2}
    ),
}
rng = np.random.default_rng(4)
held_y = rng.integers(0, 2, 100)
held_x = (rng.normal(size=(100, 8)) + 0.8 * held_y[:, None]).astype("float32")


def find_pid(task):
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes().split(b"\\0")
            except OSError:
                continue
            own = (f"INSITU_JOB_ID={me.job_id}".encode(), f"INSITU_TASK={task}".encode())
            if all(mark in environment for mark in own):
                return int(entry.name)
    raise LookupError(f"{task} doesn't run")


class Kill(est.SessionRunHook):
    """Kills tasks at steps: `kills` are (task that does it, step, task that dies)."""

    def after_run(self, run_context, run_values):
        for task, step, victim in kills:
            marker = out / f"killed-{victim}"
            if str(me.task) == task and self.global_step >= step and not marker.exists():
                marker.write_text(f"{self.global_step}")
                os.kill(find_pid(victim), signal.SIGKILL)


class KillScorer(keras.callbacks.Callback):
    def on_test_end(self, logs=None):
        marker = out / "killed-evaluator:0"
        if kills and me.role == "evaluator" and not marker.exists():
            marker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


strategy = MADE[name]()


def layer(units, number, **options):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(number), **options)


def as_keys(x):
    return np.arange(8) * 2**40 + (x > 0.4)


def read():
    data = insitu.dataset("numbers").shuffle().batch(40)
    if name != "hybrid":
        return data
    return data.map(lambda x, y: (as_keys(x), y))


def read_held():
    if name != "hybrid":
        return held_x, held_y
    return as_keys(held_x), held_y


def model_fn(features, labels, mode):
    logits = layer(2, 2)(layer(16, 1, activation="relu", name="hidden")(features))
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(labels, logits)
    train_op = est.TrainOp(keras.optimizers.Adam(0.01), loss)
    return est.EstimatorSpec(mode, logits, loss, train_op, {"accuracy": accuracy})


config = est.RunConfig(save_checkpoints_steps=10, train_distribute=strategy)
given = {}
if form == "estimator":
    trained = est.Estimator(model_fn, config=config)
else:
    with strategy.scope():
        inputs = x = keras.Input((8,), dtype="int64" if name == "hybrid" else None)
        if name == "hybrid":
            x = keras.layers.Flatten()(insitu.layers.Embedding(4, name="table")(inputs))
        logits = layer(2, 2)(layer(16, 1, activation="relu", name="hidden")(x))
        trained = keras.Model(inputs, logits)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trained.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    given = {"config": config}
scores, published = est.train_and_evaluate(
    trained,
    est.TrainSpec(read, max_steps=75, hooks=[Kill()]),
    est.EvalSpec(read_held, hooks=[KillScorer()], start_delay_secs=0, throttle_secs=0),
    **given,
)
if me.role != "evaluator":
    model = trained.model if form == "estimator" else trained
    weights = [w for w in model.get_weights()]
    bits = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()
    step = est.hooks.read_global_step(model)
    (out / f"{me.task.role}-{me.index}.json").write_text(json.dumps({"bits": bits, "step": step}))
'''


@dataclass(frozen=True)
class Row:
    """One strategy: how it is started, and which tasks are killed."""

    name: str
    options: tuple[str, ...]
    #: (task that does it, step, task that dies).
    kills: tuple[tuple[str, int, str], ...]
    #: Whether a failure changes no bit, and leaves the ledger as it is.
    has_bits: bool = True
    backends: tuple[str, ...] = ("jax",)
    form: str = "model"


ALONE = ("--workers", "1", "--evaluator")
DEVICES = (*ALONE, "--virtual-devices", "cpu:2")
TWO = ("--chief", "--workers", "1", "--evaluator")
SERVERS = (*TWO, "--ps", "2", "--ps-backups", "1")
CHIEF = ("worker:0", 45, "worker:0")
WORKER = ("worker:1", 22, "worker:1")
SERVER = ("worker:1", 62, "ps:1")
ROWS_OF_MATRIX = (
    Row("one device", ALONE, (CHIEF,), backends=("jax", "tensorflow")),
    Row("mirrored", DEVICES, (CHIEF,), backends=("jax", "tensorflow")),
    Row("ring", TWO, (CHIEF, WORKER), backends=("jax", "tensorflow")),
    Row("xla", TWO, (CHIEF, WORKER)),
    Row("central storage", DEVICES, (CHIEF,)),
    Row("layout map", DEVICES, (CHIEF,)),
    Row("sync", SERVERS, (CHIEF, WORKER, SERVER), backends=("jax", "tensorflow")),
    Row("sync", SERVERS, (CHIEF, WORKER, SERVER), form="estimator"),
    Row("async", SERVERS, (CHIEF, WORKER, SERVER), has_bits=False, backends=("jax", "tensorflow")),
    Row("bounded", SERVERS, (CHIEF, WORKER, SERVER), has_bits=False),
    Row("bounded", SERVERS, (CHIEF, WORKER, SERVER), has_bits=False, form="estimator"),
    Row("hybrid", tuple(o for o in SERVERS if o != "--evaluator"), (CHIEF, WORKER, SERVER), has_bits=False),
)
QUICK = Row(
    "async",
    ("--workers", "1", "--evaluator", "--ps", "2", "--ps-backups", "1"),
    (("worker:0", 20, "ps:1"), CHIEF),
    has_bits=False,
)
"""A small job for a first look: chief, ps and evaluator are killed."""


@dataclass(frozen=True)
class Outcome:
    """What is known of a job that has ended."""

    #: What `insitu describe --json` says.
    job: dict[str, Any]
    #: The rows that were trained, by epoch and partition, as `describe --ledger --json` says.
    ledger: dict[str, Any]
    #: What each worker has written: the hash of its weights, and its number of steps.
    workers: list[dict[str, Any]]
    #: The tasks that were killed.
    killed: set[str]
    output: str


def run(root: Path, row: Row, backend: str, *, kills: bool) -> Outcome:
    """Run the job of a row, with or without its kills."""
    paths, out, folder = Paths(root / "home"), root / "out", root / "job"
    for made in (root, paths.home, out, folder):
        made.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    make_cache(paths, root)
    arguments = (str(out), row.name, json.dumps(row.kills if kills else ()), row.form)
    environment = {**os.environ, "INSITU_HOME": str(paths.home), "NO_COLOR": "1", "KERAS_BACKEND": backend}

    def insitu(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "insitu", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{row}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    options = (*row.options, "--threads", "1", "--max-restarts", "9", "--stall-timeout", "60")
    done = insitu("start", *options, "numbers", str(folder), "train.py", *arguments)
    job_id = done.stderr.splitlines()[0].strip()
    return Outcome(
        json.loads(insitu("describe", job_id, "--json").stdout),
        json.loads(insitu("describe", job_id, "--ledger", "--json").stdout),
        [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))],
        {path.name.removeprefix("killed-") for path in out.glob("killed-*")},
        done.stdout,
    )
