"""What `train_and_evaluate` costs beside `fit`, and what an evaluator costs the training.

  fit                 fit with insitu.BackupAndRestore, of the same steps, to the same checkpoints
  train_and_evaluate  the same training by global steps, evaluated at its end alone, which isn't counted
  with an evaluator   the same beside a process that scores each checkpoint

The first two are trained in one process, in turn. Their figure is the median over intervals between two
checkpoints, each with its checkpoint: means show what else the machine did. The third is a job of two workers
and an evaluator, beside the same job without. The evaluator is a process that computes: where all cores are
busy, it takes its share of them from the workers. So its share is named beside what it costs, and what it
costs beyond that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import common

STEPS, QUICK_STEPS, INTERVAL = 5000, 200, 500
JOB_STEPS, QUICK_JOB_STEPS = 1500, 120
JOB = """
import json, os, sys, time
from pathlib import Path
import keras
import numpy as np
import insitu
from insitu import estimator as est

out, steps, interval = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
me = insitu.context()
x = np.random.default_rng(0).normal(size=(4096, 28, 28, 1)).astype("float32")
y = (x[:, :, :14].mean(axis=(1, 2, 3)) > 0).astype("int64")
with insitu.MultiWorkerMirroredStrategy().scope():
    layers = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.MaxPooling2D()]
    layers += [keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


class Clock(est.SessionRunHook):
    def after_run(self, run_context, run_values):
        if self.global_step in (steps // 5, steps):
            self.times = [*getattr(self, "times", ()), time.perf_counter()]


clock = Clock()
est.train_and_evaluate(
    model,
    est.TrainSpec(lambda: (x, y), max_steps=steps, hooks=[clock]),
    est.EvalSpec(lambda: (x[:512], y[:512]), start_delay_secs=0, throttle_secs=0 if me.job_id else 1e9),
    config=est.RunConfig(save_checkpoints_steps=interval),
)
used = time.process_time()
seconds = clock.times[1] - clock.times[0] if me.role != "evaluator" else 0
(out / f"{me.task}.json").write_text(json.dumps({"seconds": seconds, "processor": used}))
"""


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    steps, job_steps = (QUICK_STEPS, QUICK_JOB_STEPS) if options.quick else (STEPS, JOB_STEPS)
    contenders = make_contenders(steps)
    rounds = options.rounds or (2 if options.quick else 7)
    results = common.alternate(contenders, "ms/step", rounds, warm_up=1)
    fit, by_steps = (results[name].median or 0.0 for name in contenders)
    rows = [
        ["fit", f"{fit:.3f}", ""],
        ["train_and_evaluate", f"{by_steps:.3f}", f"{by_steps / fit - 1:+.2%}"],
    ]
    jobs = [run_jobs(job_steps) for _ in range(1 if options.quick else 5)]
    alone, beside, share = (statistics.median(column) for column in zip(*jobs, strict=True))
    rows += [
        ["two workers", f"{alone:.3f}", ""],
        ["two workers, with an evaluator", f"{beside:.3f}", f"{beside / alone - 1:+.2%}"],
    ]
    print(common.machine_line(machine))
    print()
    print(common.table(["", "ms a step", "more"], rows))
    print()
    more = beside / alone - 1
    print(
        f"The evaluator took {share:.1%} of the time of all cores. Training took {more:+.1%}; "
        f"without that share {(1 + more) * (1 - share) - 1:+.1%}."
    )
    figures = {name: result.figures for name, result in results.items()}
    common.save_json(options.json, "train_and_evaluate", machine, ms=figures, jobs=jobs)


def make_contenders(steps: int) -> dict[str, Any]:
    """Return what trains `steps` steps, and returns milliseconds of one."""
    import keras
    import numpy as np

    import insitu
    from insitu import estimator as est

    rng = np.random.default_rng(0)
    x = rng.normal(size=(32 * INTERVAL, 64)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")

    def make_model() -> Any:
        with insitu.MultiWorkerMirroredStrategy().scope():
            layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((64,)), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"])
        return model

    interval = min(INTERVAL, steps // 4)

    class Clock(keras.callbacks.Callback):
        """Times the intervals behind the first one, which is compiled in."""

        hears_batches = False

        def on_train_begin(self, logs: Any = None) -> None:
            self.begun: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun.append(time.perf_counter())

        def find_step(self) -> float:
            """Return the milliseconds of a step."""
            spans = [end - begun for begun, end in pairwise(self.begun[1:])]
            return 1000 * statistics.median(spans) / interval

    def fit() -> float:
        with tempfile.TemporaryDirectory() as folder:
            clock = Clock()
            make_model().fit(
                x,
                y,
                batch_size=32,
                epochs=steps // interval,
                steps_per_epoch=interval,
                verbose=0,
                callbacks=[insitu.BackupAndRestore(folder), clock],
            )
            return clock.find_step()

    def by_steps() -> float:
        with tempfile.TemporaryDirectory() as folder:
            clock = Clock()
            est.train_and_evaluate(
                make_model(),
                est.TrainSpec(lambda: (x, y), max_steps=steps, hooks=[clock]),
                est.EvalSpec(lambda: (x[:32], y[:32]), start_delay_secs=1e9),
                config=est.RunConfig(folder, save_checkpoints_steps=interval),
            )
            return clock.find_step()

    return {"fit": fit, "train_and_evaluate": by_steps}


def run_jobs(steps: int) -> tuple[float, float, float]:
    """Return milliseconds of a step without and with an evaluator, and its share of all cores' time."""
    found = []
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "job").mkdir()
        (Path(root) / "job" / "train.py").write_text(JOB)
        for number, more in enumerate(([], ["--evaluator"])):
            out = Path(root) / f"out{number}"
            out.mkdir()
            command = [
                sys.executable,
                "-m",
                "insitu",
                "start",
                "--workers",
                "2",
                "--threads",
                "1",
                *more,
                "-",
            ]
            began = time.perf_counter()
            subprocess.run(
                [
                    *command,
                    str(Path(root) / "job"),
                    "train.py",
                    str(out),
                    str(steps),
                    str(max(10, steps // 10)),
                ],
                env={**os.environ, "INSITU_HOME": str(Path(root) / "home")},
                check=True,
                capture_output=True,
            )
            wall = time.perf_counter() - began
            written = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
            seconds = written["worker:0"]["seconds"]
            share = written.get("evaluator:0", {}).get("processor", 0.0) / (wall * (os.cpu_count() or 1))
            found.append((1000 * seconds / (steps - steps // 5), share))
    (alone, _), (beside, share) = found
    return alone, beside, share


if __name__ == "__main__":
    main()
