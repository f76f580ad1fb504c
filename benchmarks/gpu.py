"""One replica on a GPU, compared with loops without Keras' `fit`: rows per second on JAX and PyTorch.

  insitu on jax, bare jax        the same Keras network; bare: jax.jit around stateless_call, SGD by hand
  insitu on torch, bare torch    the same Keras network; bare: forward, backward and torch.optim.SGD

There are two networks: the small one for Quick, Draw! shapes, batch 1024, and ResNet-50 with 224 x 224
pictures, batch 64. The target is at least 0.98 of the bare rate. Without a GPU the script prints "no GPU"
and exits with 0. --dry-run runs small shapes on the CPU to check that the code runs; its figures say
nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import common
from training_peers.models import epoch_clock

SHAPES = {"cnn": ((28, 28, 1), 1024, 60), "resnet50": ((224, 224, 3), 64, 30)}
DRY = {"cnn": ((28, 28, 1), 16, 3), "resnet50": ((32, 32, 3), 2, 2)}
"""Of each network: shape of a row, rows of a step, steps of an epoch."""
CONTENDERS = ("insitu on jax", "bare jax", "insitu on torch", "bare torch")
PATIENCE = 580.0


def network(keras: Any, name: str, shape: tuple[int, ...]) -> Any:
    if name == "resnet50":
        return keras.applications.ResNet50(
            weights=None, input_shape=shape, classes=10, classifier_activation=None
        )
    layers = keras.layers
    return keras.Sequential(
        [
            *(keras.Input(shape), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten()),
            *(layers.Dense(128, activation="relu"), layers.Dense(10)),
        ]
    )


def best_rate(epoch: Callable[[], Any], rows: int) -> float:
    """Rows per second of the best of three epochs after a first one, as `insitu_rate` has them."""
    epoch()
    return rows / min(common.timed(epoch) for _ in range(3))


def insitu_rate(name: str, spec: Any) -> float:
    import keras

    import insitu

    shape, batch, steps = spec
    x, y = rows_of(spec)
    with insitu.OneDeviceStrategy(best_device()).scope():
        model = network(keras, name, shape)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    clock = epoch_clock(keras)
    model.fit(x, y, batch_size=batch, epochs=4, shuffle=False, verbose=0, callbacks=[clock])
    return batch * steps / min(clock.seconds[1:])


def best_device() -> str:
    from insitu.train.devices.names import default_device

    return default_device().name


def rows_of(spec: Any) -> tuple[Any, Any]:
    import numpy as np

    shape, batch, steps = spec
    rng = np.random.default_rng(0)
    return rng.random((batch * steps, *shape), dtype=np.float32), rng.integers(0, 10, batch * steps).astype(
        "int32"
    )


def bare_jax_rate(name: str, spec: Any) -> float:
    import jax
    import keras

    shape, batch, steps = spec
    x, y = rows_of(spec)
    model = network(keras, name, shape)
    weights = [v.value for v in model.trainable_variables]
    momentum = [jax.numpy.zeros_like(w) for w in weights]
    others = [v.value for v in model.non_trainable_variables]

    def loss_of(weights: Any, others: Any, images: Any, labels: Any) -> Any:
        logits, others = model.stateless_call(weights, others, images, training=True)
        return -jax.nn.log_softmax(logits)[jax.numpy.arange(batch), labels].mean(), others

    def step(state: Any, images: Any, labels: Any) -> Any:
        weights, momentum, others = state
        gradients, others = jax.grad(loss_of, has_aux=True)(weights, others, images, labels)
        momentum = [0.9 * m - 0.01 * g for m, g in zip(momentum, gradients, strict=True)]
        return [w + m for w, m in zip(weights, momentum, strict=True)], momentum, others

    compiled = jax.jit(step, donate_argnums=0)
    state = [(weights, momentum, others)]

    def epoch() -> None:
        for start in range(0, batch * steps, batch):
            state[0] = compiled(state[0], x[start : start + batch], y[start : start + batch])
        jax.block_until_ready(state[0])

    return best_rate(epoch, batch * steps)


def bare_torch_rate(name: str, spec: Any) -> float:
    import keras
    import torch

    shape, batch, steps = spec
    x, y = (torch.from_numpy(part) for part in rows_of(spec))
    model = network(keras, name, shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.SGD([v.value for v in model.trainable_variables], lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()

    def epoch() -> None:
        for start in range(0, batch * steps, batch):
            images = x[start : start + batch].to(device, non_blocking=True)
            labels = y[start : start + batch].to(device, non_blocking=True).long()
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(images, training=True), labels).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return best_rate(epoch, batch * steps)


def child(contender: str, name: str, dry: bool) -> None:
    """Measures one contender in this process."""
    spec = (DRY if dry else SHAPES)[name]
    kind, _, backend = contender.rpartition(" ")
    rate = insitu_rate if kind == "insitu on" else {"jax": bare_jax_rate, "torch": bare_torch_rate}[backend]
    print(f"RATE {json.dumps(rate(name, spec))}")


def in_a_process(contender: str, name: str, dry: bool) -> Callable[[], float]:
    backend = contender.rpartition(" ")[2]

    def run() -> float:
        if importlib.util.find_spec(backend) is None:
            raise common.Unavailable(f"{backend} isn't installed")
        # Its figures say nothing: what is compiled may as well be slow.
        environment = {"CUDA_VISIBLE_DEVICES": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if dry else {}
        done = subprocess.run(
            [sys.executable, __file__, "--child", contender, name, *(["--dry-run"] if dry else [])],
            env={**os.environ, **environment, "KERAS_BACKEND": backend},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        line = next((line for line in done.stdout.splitlines() if line.startswith("RATE ")), None)
        if line is None:
            raise common.Unavailable((done.stderr.strip().splitlines() or ["it printed nothing"])[-1][:200])
        return float(line.removeprefix("RATE "))

    return run


def has_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return "GPU" in listed.stdout


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument("--dry-run", action="store_true", help="small shapes, on the CPU")
    arguments = options.parse_args()
    if not arguments.dry_run and not has_gpu():
        print("no GPU")
        return
    rounds = arguments.rounds or (1 if arguments.quick or arguments.dry_run else 3)
    machine = common.machine()
    print(common.machine_line(machine))
    figures = {}
    started = time.perf_counter()
    for name in SHAPES:
        contenders = {c: in_a_process(c, name, arguments.dry_run) for c in CONTENDERS}
        results = common.alternate(contenders, "rows/s", rounds)
        print(f"\n{name}\n\n{common.results_table(results, 'insitu on jax', form='{:,.0f}'.format)}")
        for backend in ("jax", "torch"):
            mine, bare = results[f"insitu on {backend}"].median, results[f"bare {backend}"].median
            if mine and bare:
                print(f"\ninsitu on {backend}: {mine / bare:.3f} of the bare rate")
        figures[name] = common.results_json(results)
    common.say(f"{time.perf_counter() - started:.0f} s")
    common.save_json(arguments.json, "gpu", machine, networks=figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], "--dry-run" in sys.argv)
    else:
        main()
