"""What a strategy costs compared with plain Keras `fit`, on each backend: seconds a step, all in one process.

  Keras               compile and fit, no strategy
  Keras again         the same once more: how much the machine itself varies
  OneDevice           insitu.OneDeviceStrategy
  Mirrored            insitu.MirroredStrategy on one device
  MultiWorker         insitu.MultiWorkerMirroredStrategy with one worker

There are two models: the network for Quick, Draw! shapes (28 x 28 x 1, batch 64), which shows the
computation, and a tiny dense one, which shows the cost of each step. Each operation has one thread.
TensorFlow runs operations at the same time on both cores, as it does by default. Memory comes in large
pages, as in a job.

Fits of the contenders alternate in one process, in another order each round. Half of the rounds run in a
second process, because the place of a model's arrays in memory changes the speed by some percent. A figure
is the median over rounds of the fastest epoch's time, without the first epoch and the start of the fit.
Percentages are relative to the mean of both fits of Keras in that round ("Keras again": to the other fit).
With one replica insitu leaves training to Keras: the columns must agree within the noise.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import common
from training_peers.models import epoch_clock

BACKENDS = ("tensorflow", "jax", "torch")
STEPS = {
    "cnn": {"tensorflow": 40, "jax": 4, "torch": 4},
    "tiny": {"tensorflow": 100, "jax": 200, "torch": 50},
}
EPOCHS = {"tensorflow": 3, "jax": 6, "torch": 6}
"""Epochs of a fit and steps of an epoch. Short ones, so that what slows the machine for a while meets all
contenders of a round, or spares an epoch; but Keras on TensorFlow begins each with some 100 ms of its own."""
PROCESSES = 2
BATCH = 64
PATIENCE = 600.0


def data(model: str, steps: int) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = BATCH * steps
    shape = (rows, 28, 28, 1) if model == "cnn" else (rows, 8)
    return rng.random(shape, dtype=np.float32), rng.integers(0, 10, rows).astype("int32")


def build(keras: Any, model: str) -> Any:
    layers = keras.layers
    stack = [keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(10)]
    if model == "cnn":
        stack = [
            *(keras.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()),
            *(layers.Dense(128, activation="relu"), layers.Dense(10)),
        ]
    built = keras.Sequential(stack)
    built.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return built


def contenders(insitu: Any) -> dict[str, Any]:
    """What makes each strategy; None is no strategy."""
    return {
        "Keras": None,
        "Keras again": None,
        "OneDevice": lambda: insitu.OneDeviceStrategy("cpu:0"),
        "Mirrored": lambda: insitu.MirroredStrategy(["cpu:0"]),
        "MultiWorker": lambda: insitu.MultiWorkerMirroredStrategy("ring"),
    }


def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each contender, in this process."""
    import contextlib

    import keras

    import insitu

    backend = keras.backend.backend()
    steps, epochs = STEPS[model][backend], EPOCHS[backend]
    x, y = data(model, steps)
    made = {}
    for name, make in contenders(insitu).items():
        with make().scope() if make else contextlib.nullcontext():
            made[name] = build(keras, model)
        made[name].fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    figures: dict[str, list[float]] = {name: [] for name in made}
    names = list(made)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            clock = epoch_clock(keras)
            options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            made[name].fit(x, y, epochs=epochs, callbacks=[clock], **options)
            figures[name].append(min(clock.seconds[1:]) / steps)
    return figures


def in_a_process(backend: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By model, the seconds a step of each contender."""
    if importlib.util.find_spec(backend) is None:
        raise common.Unavailable(f"{backend} isn't installed")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS"), "1")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": backend}
    pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(rounds)],
        env={**os.environ, **threads, **quiet, **pages},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIGURES")), None)
    if line is None:
        raise SystemExit(f"{backend} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, dict[str, list[float]]] = json.loads(line.removeprefix("FIGURES"))
    return figures


COLUMNS = {
    "Keras again": "Keras again",
    "OneDevice": "OneDevice",
    "Mirrored": "Mirrored, one device",
    "MultiWorker": "MultiWorker, one worker",
}


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rounds = options.rounds or (2 if options.quick else 8)
    machine = common.machine()
    print(common.machine_line(machine), flush=True)
    content: dict[str, Any] = {}
    for backend in BACKENDS:
        try:
            parts = []
            for number in range(PROCESSES):
                common.say(f"{backend}, process {number + 1} of {PROCESSES}")
                parts.append(in_a_process(backend, -(-rounds // PROCESSES)))
        except common.Unavailable as error:
            print(f"\n{backend}: not measured, {error}", flush=True)
            continue
        content[backend] = {model: _joined([part[model] for part in parts]) for model in STEPS}
        rows = [
            [model, f"{statistics.median(figures['Keras']) * 1e3:.3f}", *(_over(figures, n) for n in COLUMNS)]
            for model, figures in content[backend].items()
        ]
        table = common.table([backend, "Keras, ms a step", *COLUMNS.values()], rows)
        print(f"\n{table}", flush=True)
        common.save_json(options.json, "strategies", machine, seconds_per_step=content)


def _joined(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [second for part in parts for second in part[name]] for name in parts[0]}


def _over(figures: dict[str, list[float]], name: str) -> str:
    """Each fit beside those of Keras in the same round: what slows both is left out."""
    both = zip(figures["Keras"], figures["Keras again"], strict=True)
    beside = figures["Keras"] if name == "Keras again" else [(a + b) / 2 for a, b in both]
    ratios = [mine / keras for mine, keras in zip(figures[name], beside, strict=True)]
    return f"{(statistics.median(ratios) - 1) * 100:+.1f} %"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(f"FIGURES{json.dumps({model: measure(model, int(sys.argv[2])) for model in STEPS})}")
    else:
        main()
