"""Jobs on agents' hosts: a small training whose weights say whether anything has disturbed it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from agent_hosts import insitu, wait_until

from insitu.base.paths import Paths
from insitu.cluster.job_files import read_supervisor

JOB_SECONDS = 240.0
SCRIPT = '''
"""train.py FOLDER [KILL]: waits in the middle while FOLDER has no file `go`; KILL names a task that dies."""
import hashlib, os, signal, socket, sys, time
from pathlib import Path

import keras
import numpy as np
import insitu

folder, kill = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
me = insitu.context()
print("WHERE", me.task, me.node, socket.gethostname(), me.paths.home, flush=True)
rng = np.random.default_rng(5)
X, Y = rng.normal(size=(230, 12)).astype("float32"), rng.integers(0, 4, 230)
with insitu.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)


class Disturb(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if me.incarnation > 1 or (self.epoch, batch) != (1, 2):
            return
        (folder / f"{me.role}-{me.index}").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
        if str(me.task) == kill:
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [insitu.BackupAndRestore(save_freq=2), Disturb()]
rows = {"x": X, "y": Y, "batch_size": 48, "shuffle": True}
if me.cache:
    cache = insitu.dataset().shuffle().batch(48)
    rows = {"x": cache.map(lambda x, y: (x.reshape(len(x), 12) / 9, y))}
model.fit(**rows, epochs=4, verbose=0, callbacks=callbacks)
print("RESULT", hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(), flush=True)
'''


CACHE_SCRIPT = """
import hashlib
import keras
import insitu

train = insitu.dataset().shuffle().batch(16).map(lambda x, y: (x.reshape(len(x), 12) / 9, y))
scale = keras.layers.Normalization()
insitu.adapt(scale, insitu.dataset().map(lambda x, y: (x.reshape(len(x), 12) / 9, y)))
other = insitu.dataset("images/test").batch(16).map(lambda x, y: (x.reshape(len(x), 12) / 9, y))
with insitu.MultiWorkerMirroredStrategy().scope():
    layers = [scale, keras.layers.Dense(8, "relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((12,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train, epochs=2, verbose=0)
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
print("RESULT", digest, model.evaluate(other, verbose=0), flush=True)
"""
"""Trains on the cache of the job, and scores another one."""


class HostJobs:
    """Starts jobs in a home, and looks at them as a user would."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        (self.code / "train.py").write_text(SCRIPT)
        #: Where tasks say that they are in the middle, and wait.
        self.meeting = folder / "meeting"
        self.meeting.mkdir()

    def let_go(self) -> None:
        (self.meeting / "go").touch()

    def start(self, *options: str, workers: int, kill: str = "", cache: str = "-") -> str:
        """Return the id of a job, which runs on."""
        fixed = ("--detach", "--workers", str(workers), "--threads", "1", "--standby", "0")
        script = (cache, str(self.code), "train.py", str(self.meeting), *([kill] if kill else []))
        done = insitu(self.home, "start", *fixed, *options, *script, KERAS_BACKEND="jax", NO_COLOR="1")
        return done.stdout.strip()

    def wait_in_the_middle(self, job: str, workers: int) -> None:
        wait_until(
            lambda: len(list(self.meeting.glob("worker-*"))) == workers or self.assert_running(job),
            "the middle",
        )

    def assert_running(self, job: str) -> bool:
        assert self.describe(job)["state"] in ("pending", "running"), self.output(job)
        return False

    def describe(self, job: str) -> dict[str, Any]:
        return json.loads(insitu(self.home, "describe", job, "--json").stdout)  # type: ignore[no-any-return]

    def output(self, job: str) -> str:
        return Paths(self.home).job(job).output.read_text()

    def finish(self, job: str) -> tuple[dict[str, Any], set[str]]:
        """Return what `describe` says of a job that ends well, and the weights that its tasks ended with."""
        done = subprocess.run(
            [sys.executable, "-m", "insitu", "attach", job],
            env={**os.environ, "INSITU_HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=JOB_SECONDS,
        )
        assert done.returncode == 0, self.output(job)
        lines = self.output(job).splitlines()
        return self.describe(job), {line.split("RESULT ")[1] for line in lines if "] RESULT " in line}

    def where(self, job: str) -> dict[str, list[str]]:
        """Return [node, host, home] of each task, as its last incarnation has said."""
        lines = [
            line.split("WHERE ")[1].split() for line in self.output(job).splitlines() if "] WHERE " in line
        ]
        return {task: rest for task, *rest in lines}

    def kill_supervisor(self, job: str) -> None:
        path = Paths(self.home).job(job).controller
        os.kill(wait_until(lambda: read_supervisor(path), "the supervisor").pid, signal.SIGKILL)


def make_images(folder: Path) -> Path:
    """Write a file of small images for each of four classes."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for label in range(4):
        np.save(folder / f"{label}.npy", rng.integers(0, 9, (60 + label, 4, 3)).astype(np.uint8))
    return folder


def run_undisturbed(folder: Path, workers: int) -> set[str]:
    """Return the weights of the same job on this machine, without a head."""
    folder.mkdir()
    jobs = HostJobs(folder / "home", folder)
    jobs.let_go()
    return jobs.finish(jobs.start(workers=workers))[1]


IMPORT_OPTIONS = ("--partitions", "6", "--backups", "1", "--label-from-filename")


def run_undisturbed_on_images(folder: Path, workers: int) -> tuple[set[str], Any]:
    """Return the weights and the ledger of the job on the images of `make_images`, which are imported with
    IMPORT_OPTIONS onto a node of this machine for each worker."""
    jobs = HostJobs(folder / "home", folder / "job")
    insitu(jobs.home, "up", "--nodes", str(workers))
    insitu(jobs.home, "import", "images", str(make_images(folder / "images")), *IMPORT_OPTIONS)
    jobs.let_go()
    job = jobs.start(workers=workers, cache="images")
    _, weights = jobs.finish(job)
    return weights, read_ledger(insitu(jobs.home, "describe", job, "--ledger", "--json").stdout)


def read_ledger(report: str) -> Any:
    """Return the account of rows out of what `describe --ledger --json` has printed."""
    ledger = json.loads(report)["ledger"]
    assert ledger, report
    return ledger
