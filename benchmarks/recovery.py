"""From the SIGKILL of one of two workers to the next step that all have completed.

Contenders, in turn, each for a one-layer model and for one with 20 million parameters:
  insitu, standby     `insitu start --standby 1`: a loaded process takes the place; the other worker
                      continues
  insitu, no standby  `insitu start --standby 0`: a new process takes the place
  torchrun            torch.distributed.run --max-restarts, DistributedDataParallel over gloo: all workers
                      start again; the script has no checkpoint, so it starts its data over
  Ray Train v2        TorchTrainer with FailureConfig, the same model and script: likewise

insitu runs Keras 3 on the backend of KERAS_BACKEND (TensorFlow if unset), with one thread per worker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import numpy as np
import psutil

from insitu.base.errors import JobEnded
from insitu.base.paths import JobPaths, Paths
from insitu.base.progress import read_progress
from insitu.cluster import Journal, Request, stop_job, submit
from insitu.grid import import_cache

MODELS = {"one layer": [], "20 M": [4096, 3968]}
"""Units of the hidden layers between 784 inputs and 10 outputs."""
PEERS = Path(__file__).parent / "recovery_peers"
PATIENCE = 90.0
"""Seconds for each wait; a contender that needs longer is named as missing, and the rest continues."""
STEPS_BEFORE = 5

SCRIPT = """
import json, os, sys
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import insitu, keras

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("recovery/rows").shuffle().batch(64)
with strategy.scope():
    hidden = [keras.layers.Dense(units, "relu") for units in json.loads(sys.argv[1])]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(train, epochs=100000, verbose=0)
"""


wait_for = partial(common.wait_for, pause=0.005, patience=PATIENCE)


class Bench:
    """A home with a small cache, and the scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(root / "home")
        self.job = root / "job"
        self.job.mkdir()
        (self.job / "train.py").write_text(SCRIPT)
        rows = np.random.default_rng(0).random((2048, 784), dtype=np.float32)
        np.savez(root / "rows.npz", x=rows, label=np.arange(2048) % 10)
        import_cache(self.paths, "recovery/rows", [str(root / "rows.npz")])
        os.environ["INSITU_HOME"] = str(self.paths.home)

    def insitu(self, model: str, standby: int) -> float:
        command = ("train.py", json.dumps(MODELS[model]))
        request = Request("recovery/rows", self.job, command, workers=2, threads=1, standby=standby)
        job = self.paths.job(submit(self.paths, request))
        try:
            wait_for("the first steps", lambda: self._steps(job) >= STEPS_BEFORE)
            if standby:
                wait_for("the standby", lambda: self._stands_by(job), pause=0.5)
            victim = Journal(job.journal).state().tasks[1].pid
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            recovery = wait_for("the recovery", lambda: self._recovered(job), pause=0.05)
            return float(recovery.ended - killed)
        finally:
            # Asked twice it kills at once.
            for _ in range(2):
                with suppress(JobEnded):
                    stop_job(job)

    def _steps(self, job: JobPaths) -> int:
        tasks = Journal(job.journal).state().members
        records = [read_progress(job.progress(t.task)) for t in tasks]
        return min((r.epoch * 64 + r.step if r and r.elastic else -1 for r in records), default=-1)

    @staticmethod
    def _stands_by(job: JobPaths) -> bool:
        """Whether a standby of the job has done its loading: it uses no more time."""
        for process in psutil.process_iter(["cmdline"]):
            if "--standby" in (process.info["cmdline"] or ()) and str(job.code) == process.cwd():
                before = sum(process.cpu_times()[:2])
                time.sleep(1.0)
                after = sum(process.cpu_times()[:2])
                return before > 1.0 and after - before < 0.02
        return False

    @staticmethod
    def _recovered(job: JobPaths) -> Any:
        done = [r for r in Journal(job.journal).state().recoveries if r.ended is not None]
        return done[0] if done else None

    def torchrun(self, model: str) -> float:
        options = ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1"]
        options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        return self._torch(model, ["-m", "torch.distributed.run", *options, str(PEERS / "torchrun_rank.py")])

    def ray_train(self, model: str) -> float:
        if find_spec("ray") is None:
            raise common.Unavailable("Ray is not installed: pip install -r benchmarks/requirements.txt")
        return self._torch(model, [str(PEERS / "ray_train.py")])

    def _torch(self, model: str, launch: list[str]) -> float:
        marks = Path(tempfile.mkdtemp(dir=self.root))
        with self._running([sys.executable, *launch, json.dumps(MODELS[model]), str(marks)]):
            first = wait_for("the peer's first steps", lambda: self._all_at(marks, STEPS_BEFORE))
            killed = time.time()
            os.kill(first[1], signal.SIGKILL)
            others = set(first.values())
            wait_for("the peer's recovery", lambda: self._all_at(marks, 1, besides=others), pause=0.02)
            begun = [path for path in marks.iterdir() if int(path.name.split("-")[1]) not in first.values()]
            return max(float(path.read_text().split()[0]) for path in begun) - killed

    @contextmanager
    def _running(self, command: list[str]) -> Iterator[None]:
        """The peer, which is ended at once with all that it has started: asked to, it would take its time."""
        environment = {**os.environ, "RAY_TMPDIR": str(self.root)}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            started = psutil.Process(process.pid).children(recursive=True)
            for child in [process, *started]:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    child.kill()
            process.wait()
            psutil.wait_procs(started, timeout=10)

    @staticmethod
    def _all_at(marks: Path, steps: int, besides: set[int] | None = None) -> dict[int, int]:
        """{rank: process id} once both ranks have done `steps` steps in other processes than `besides`."""
        found = {}
        for path in marks.iterdir():
            rank, pid = map(int, path.name.split("-"))
            if pid not in (besides or ()) and len(path.read_text().splitlines()) >= steps:
                found[rank] = pid
        return found if len(found) == 2 else {}


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rounds = options.rounds or (1 if options.quick else 2)
    machine = common.machine()
    tables, saved = [], {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder))
        for model in list(MODELS)[: 1 if options.quick else None]:
            contenders: dict[str, Callable[[], float]] = {
                "insitu, standby": partial(bench.insitu, model, 1),
                "insitu, no standby": partial(bench.insitu, model, 0),
                "torchrun": partial(bench.torchrun, model),
                "Ray Train v2": partial(bench.ray_train, model),
            }
            results = common.alternate(contenders, "s to the next step of all", rounds)
            shown = common.results_table(
                results, "insitu, standby", more_is_better=False, form="{:.2f}".format
            )
            tables.append(f"\n{model}\n\n{shown}")
            saved[model] = common.results_json(results)
    print(common.machine_line(machine))
    print("\n".join(tables))
    common.save_json(options.json, "recovery", machine, models=saved)


if __name__ == "__main__":
    main()
