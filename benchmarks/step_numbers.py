"""What it costs a task to measure itself: microseconds of a step, and their share of a step of 5 ms.

  account  what each step does: the clock is read as its activity changes, and the step is counted
  sample   a line of the task's file, written twice a second: logs, updates, memory, processor
  StepLog  what a step costs where a line is printed every 100 steps, without the printing

The update count is read from a Keras optimizer, the logs are NumPy scalars. A step of a job writes a progress
record besides, which is measured in the cost of being able to recover.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import keras
import numpy as np

from insitu.base.context import Context
from insitu.base.measure.time_account import ACCOUNT, CALLBACKS, DATA
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.elastic import TRAIN, LoopPosition
from insitu.train.elastic.progress_reporter import INTERVAL, StepSampler
from insitu.train.fit import StepLog
from insitu.train.replica import to_numpy

STEP = 0.005
"""Seconds of the step that costs are compared with."""
STEPS, SAMPLES = 20_000, 200


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    rounds = options.rounds or (3 if options.quick else 20)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    position = LoopPosition(0, TRAIN, 1, 0, 1)
    logs = {"loss": np.float32(0.5), "accuracy": np.float32(0.25)}
    figures: dict[str, list[float]] = {"account": [], "sample": [], "StepLog": []}
    with tempfile.TemporaryDirectory() as folder:
        context = Context(Paths(Path(folder)), "job-1", TaskId("worker", 0), "cache", (0,), 1)
        counting, writing = StepSampler(Context(Paths(Path(folder)))), StepSampler(context)
        writing.open()
        writing.begin(lambda at: int(to_numpy(model.optimizer.iterations)))
        log = make_log(model)
        for _ in range(rounds):
            figures["account"].append(measure(STEPS, lambda: account(counting, position, logs)))
            figures["sample"].append(measure(SAMPLES, lambda: write(writing, position, logs)))
            figures["StepLog"].append(measure(STEPS, lambda: log.end_step(logs)))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    medians["sample"] *= STEP / INTERVAL
    rows = [[name, f"{1e6 * seconds:.2f}", f"{seconds / STEP:.3%}"] for name, seconds in medians.items()]
    total = sum(medians.values())
    rows.append(["together", f"{1e6 * total:.2f}", f"{total / STEP:.3%}"])
    print(common.machine_line(machine))
    print()
    print(common.table(["", "us a step", "of a step of 5 ms"], rows))
    common.save_json(options.json, "step_numbers", machine, seconds=figures)


def measure(times: int, work: Callable[[], None]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def account(sampler: StepSampler, position: LoopPosition, logs: Any) -> None:
    """Do what a step of `fit` does beside writing samples."""
    ACCOUNT.enter(DATA)
    ACCOUNT.enter(CALLBACKS)
    sampler.report_place("gradient")
    sampler.report_place("exchange")
    sampler.report_place("update")
    sampler.count_step(position, 64, logs)


def write(sampler: StepSampler, position: LoopPosition, logs: Any) -> None:
    """Write a sample."""
    sampler.count_step(position, 64, logs)
    sampler.write()


def make_log(model: Any) -> StepLog:
    """Return a StepLog in the middle of a training that lasts."""
    log = StepLog(100, write=lambda line: None)
    log.set_model(model)
    log.on_train_begin()
    steps = SimpleNamespace(done=0)

    def count() -> tuple[int, int | None]:
        steps.done += 1
        return steps.done, 64 * steps.done

    log._count = count
    return log


if __name__ == "__main__":
    main()
