"""What a strategy costs over plain Keras `fit`, on each backend: seconds a step, all in one process.

  Keras               compile and fit, no strategy
  OneDevice           insitu.OneDeviceStrategy
  Mirrored            insitu.MirroredStrategy on one device
  MultiWorker         insitu.MultiWorkerMirroredStrategy with one worker

Two models: the network for Quick, Draw! shapes (28 x 28 x 1, batch 64), where computation shows, and a tiny
dense one, where the cost of each step shows. Fits of the contenders alternate in one process. The second
epoch of each is timed, so that what begins a fit doesn't count; the figure is the median over rounds of its
time over that of Keras in the same round. At most +3 % (MultiWorker: +5 %) are asked for; on TensorFlow the
tiny model shall be faster than Keras.
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
STEPS = {"cnn": 30, "tiny": 200}
BATCH = 64
PATIENCE = 600.0


def data(model: str) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = BATCH * STEPS[model]
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
        "OneDevice": lambda: insitu.OneDeviceStrategy("cpu:0"),
        "Mirrored": lambda: insitu.MirroredStrategy(["cpu:0"]),
        "MultiWorker": lambda: insitu.MultiWorkerMirroredStrategy("ring"),
    }


def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each contender, in this process."""
    import contextlib

    import keras

    import insitu

    x, y = data(model)
    made = {}
    for name, make in contenders(insitu).items():
        with make().scope() if make else contextlib.nullcontext():
            made[name] = build(keras, model)
        made[name].fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    figures: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, each in made.items():
            clock = epoch_clock(keras)
            each.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[clock])
            figures[name].append(clock.seconds[-1] / STEPS[model])
    return figures


def in_a_process(backend: str, model: str, rounds: int) -> dict[str, list[float]]:
    if importlib.util.find_spec(backend) is None:
        raise common.Unavailable(f"{backend} isn't installed")
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS"), "1")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, __file__, "--child", model, str(rounds)],
        env={**os.environ, **threads, **quiet},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FIGURES")), None)
    if line is None:
        raise SystemExit(f"{backend}, {model} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, list[float]] = json.loads(line.removeprefix("FIGURES"))
    return figures


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    rounds = options.rounds or (2 if options.quick else 9)
    machine = common.machine()
    print(common.machine_line(machine))
    content: dict[str, Any] = {}
    for model in STEPS:
        rows = []
        for backend in BACKENDS:
            common.say(f"{model}, {backend}")
            try:
                figures = in_a_process(backend, model, rounds)
            except common.Unavailable as error:
                rows.append([backend, f"not measured: {error}", "", "", ""])
                continue
            content.setdefault(model, {})[backend] = figures
            # Each epoch beside the one of Keras in the same round: what slows both is left out.
            rows.append(
                [backend, f"{statistics.median(figures['Keras']) * 1e3:.3f}"]
                + [_over(figures, name) for name in ("OneDevice", "Mirrored", "MultiWorker")]
            )
        header = [
            "backend",
            "Keras, ms a step",
            "OneDevice",
            "Mirrored, one device",
            "MultiWorker, one worker",
        ]
        print(f"\n{model}\n\n{common.table(header, rows)}")
    common.save_json(options.json, "strategies", machine, seconds_per_step=content)


def _over(figures: dict[str, list[float]], name: str) -> str:
    ratios = [mine / keras for mine, keras in zip(figures[name], figures["Keras"], strict=True)]
    return f"{(statistics.median(ratios) - 1) * 100:+.1f} %"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(f"FIGURES{json.dumps(measure(sys.argv[2], int(sys.argv[3])))}")
    else:
        main()
