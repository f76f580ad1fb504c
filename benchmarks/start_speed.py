"""From the command to the first training step, compared with plain python; and the time of `insitu ps`.

Contenders, in turn:
  python            `python train.py`, one process on the whole machine
  two pythons       two of them at once, one thread each, without a connection: what two processes cost on
                    this machine, whatever starts them
  insitu start      `insitu start --workers 2`

Each figure is the time from launching the command until every replica has done its first step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np

from insitu.base.paths import Paths
from insitu.cluster import Journal, read_spec
from insitu.grid import import_cache

MARKS = ("script", "imports", "model", "first step")
SCRIPT = """
import json, os, pathlib, sys, time
marks = {"script": time.time()}
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import insitu, keras
marks["imports"] = time.time()

class FirstStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if "first step" not in marks:
            marks["first step"] = time.time()

strategy = insitu.MultiWorkerMirroredStrategy()
train = insitu.dataset("start/speed").shuffle().batch(256)
with strategy.scope():
    model = keras.Sequential([
        keras.layers.Input((28, 28, 1)), keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Flatten(), keras.layers.Dense(10),
    ])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
marks["model"] = time.time()
model.fit(train, epochs=1, verbose=0, callbacks=[FirstStep()])
pathlib.Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(marks))
"""


class Bench:
    """A home with a small cache, and the script."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(root / "home")
        self.job = root / "job"
        self.job.mkdir()
        (self.job / "train.py").write_text(SCRIPT)
        random = np.random.default_rng(0)
        np.savez(
            root / "rows.npz",
            x=random.integers(0, 256, (1024, 28, 28, 1), dtype=np.uint8),
            label=random.integers(0, 10, 1024),
        )
        import_cache(self.paths, "start/speed", [str(root / "rows.npz")])
        self.environment = {**os.environ, "INSITU_HOME": str(self.paths.home), "TF_CPP_MIN_LOG_LEVEL": "2"}
        self.phases: dict[str, list[dict[str, float]]] = {}

    def _run(self, name: str, commands: list[list[str]], marks: Path, **environment: str) -> float:
        marks.mkdir()
        started = time.time()
        running = [
            subprocess.Popen(
                command,
                cwd=self.job,
                env=self.environment | environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]
        for process in running:
            _, told = process.communicate()
            if process.returncode != 0:
                raise SystemExit(f"{name} failed: {told}")
        replicas = [json.loads(path.read_text()) for path in marks.iterdir()]
        for path in marks.iterdir():
            path.unlink()
        marks.rmdir()
        last = {mark: max(replica[mark] for replica in replicas) - started for mark in MARKS}
        last |= self._start_phases(started) if name == "insitu start" else {}
        self.phases.setdefault(name, []).append(last)
        return last["first step"]

    def _start_phases(self, started: float) -> dict[str, float]:
        """When the job was made and when its controller began, by their own records."""
        newest = max(self.paths.jobs.iterdir(), key=lambda p: p.stat().st_mtime)
        job = self.paths.job(newest.name)
        submitted = Journal(job.journal).entries()[1]
        return {"command line": read_spec(job).created - started, "controller": submitted.at - started}

    def plain(self) -> float:
        command = [sys.executable, "train.py", str(self.root / "marks")]
        return self._run("python", [command], self.root / "marks")

    def two_plain(self) -> float:
        command = [sys.executable, "train.py", str(self.root / "marks")]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
        return self._run("two pythons", [command, command], self.root / "marks", **threads)

    def start(self) -> float:
        options = ["--workers", "2", "start/speed", str(self.job), "train.py", str(self.root / "marks")]
        command = [sys.executable, "-m", "insitu", "start", *options]
        return self._run("insitu start", [command], self.root / "marks")

    def ps(self) -> float:
        command = [sys.executable, "-m", "insitu", "ps", "--all"]
        return 1000 * common.timed(
            lambda: subprocess.run(command, env=self.environment, capture_output=True, check=True)
        )

    def typer_alone(self) -> float:
        command = [sys.executable, "-c", "import typer"]
        return 1000 * common.timed(lambda: subprocess.run(command, check=True))


def phase_table(phases: dict[str, list[dict[str, float]]]) -> str:
    """When each phase was over, in seconds after the command, as medians."""
    names = ("command line", "controller", *MARKS)
    rows = []
    for contender, runs in phases.items():
        cells = [f"{median(run[n] for run in runs):.2f}" if n in runs[0] else "" for n in names]
        rows.append([contender, *cells])
    header = (
        "over at (s)",
        "command line",
        "controller up",
        "script begins",
        "imports",
        "model",
        "first step",
    )
    return common.table(header, rows)


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    machine = common.machine()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        contenders: dict[str, Callable[[], float]] = {
            "insitu start": bench.start,
            "python": bench.plain,
            "two pythons": bench.two_plain,
        }
        starts = common.alternate(contenders, "s to the first step", rounds)
        answers: dict[str, Any] = common.alternate(
            {"insitu ps": bench.ps, "import typer": bench.typer_alone}, "ms", 3 * rounds, warm_up=1
        )
    print(common.machine_line(machine))
    print(common.results_table(starts, "insitu start", more_is_better=False, form="{:.2f}".format))
    print("\n" + phase_table(bench.phases))
    print("\n" + common.results_table(answers, "insitu ps", more_is_better=False, form="{:.0f}".format))
    common.save_json(
        options.json,
        "start_speed",
        machine,
        starts=common.results_json(starts),
        phases=bench.phases,
        commands=common.results_json(answers),
    )


if __name__ == "__main__":
    main()
