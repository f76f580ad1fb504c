"""insitu's parameter servers compared with TensorFlow's: updates per second of 2 workers with 1 server.

  insitu, async / sync    ParameterServerStrategy, Keras 3 on TensorFlow, through `fit`
  TensorFlow              tf.distribute.ParameterServerStrategy with ClusterCoordinator, a step without Keras
  compute alone           Keras alone, one process on one core
  gradient alone          one compiled function, one process on one core

Two dense models, with 55,050 and 5,824,522 parameters; plain gradient descent, 16 rows a step and worker.
The figures include the computation. The floor adds, for each gradient, the time to compute it alone and the
time to move it and the values between two processes and to update them. The latter is measured with the
calls that do it, on memory that is too large for the caches. There are two cores.

Then one of two workers is slowed ten times. The table shows what the other one does in each mode, and a
plot shows loss against time (beside the JSON file, or where `--plot` says).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from parameter_server_peers import models

from insitu.parameters import make_updater, native

PARTS = ["small", "large", "slow"]
PEERS = Path(__file__).parent / "parameter_server_peers"
PATIENCE = 240.0


@contextlib.contextmanager
def tasks(script: str, roles: dict[str, int], *arguments: str) -> Iterator[dict[str, Any]]:
    """One process for each task, by name; all are ended afterwards."""
    cluster = {role: common.addresses(count) for role, count in roles.items()}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"), "1")
    started = {}
    try:
        for role, count in roles.items():
            for index in range(count):
                config = {"cluster": cluster, "task": {"type": role, "index": index}}
                environment = {
                    **os.environ,
                    **threads,
                    "TF_NUM_INTEROP_THREADS": "5",
                    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
                    "TF_CONFIG": json.dumps(config),
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                    "KERAS_BACKEND": "tensorflow",
                }
                started[f"{role}:{index}"] = subprocess.Popen(
                    [sys.executable, str(PEERS / script), *arguments],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def output_of(process: Any) -> str:
    text: str = process.communicate(timeout=PATIENCE)[0]
    if "RATE" not in text:
        raise SystemExit(f"A task failed:\n{text[-3000:]}")
    return text


def rate(text: str, of: str = "RATE") -> float:
    found = re.search(rf"{of} ([\d.]+)", text)
    return float(found[1]) if found else 0.0


def insitu(size: str, mode: str) -> Callable[[], float]:
    def run() -> float:
        with tasks("insitu_task.py", {"ps": 1, "worker": 2}, size, mode) as started:
            total = sum(rate(output_of(started[f"worker:{index}"])) for index in (0, 1))
        # In sync a step is one update of two gradients; TensorFlow counts each gradient.
        return total

    return run


def tensorflow(size: str) -> Callable[[], float]:
    def run() -> float:
        if importlib.util.find_spec("tensorflow") is None:
            raise common.Unavailable("tensorflow isn't installed")
        with tasks("tensorflow_task.py", {"ps": 1, "worker": 2, "chief": 1}, size) as started:
            return rate(output_of(started["chief:0"]))

    return run


def alone(size: str, gradients: list[float]) -> Callable[[], float]:
    """Keras alone; what the gradient alone does goes to `gradients`."""

    def run() -> float:
        with tasks("compute_task.py", {"worker": 1}, size) as started:
            text = output_of(started["worker:0"])
        gradients.append(rate(text, "GRADIENT"))
        return rate(text)

    return run


def slowed(mode: str, seconds: float) -> dict[str, Any]:
    """Both workers' steps per second where worker 1 waits so long in each step."""
    with tasks("insitu_task.py", {"ps": 1, "worker": 2}, "small", mode, "1", str(seconds)) as started:
        texts = [output_of(started[f"worker:{index}"]) for index in (0, 1)]
    steps = [json.loads(re.search(r"STEPS (.*)", text)[1]) for text in texts]  # type: ignore[index]
    return {"fast": rate(texts[0]), "slow": rate(texts[1]), "steps": steps}


def carried(parameters: int) -> float:
    """Milliseconds of one core for one gradient: copied to shared memory and looked through for what isn't
    finite, taken from the values, and these copied to shared memory, as workers and servers do it."""
    gradient, values = (np.random.default_rng(i).random(parameters, np.float32) for i in (0, 1))
    pushed, pulled = np.zeros(parameters, np.float32), np.zeros(parameters, np.float32)
    updater = make_updater({"name": "sgd", "learning_rate": 0.01})

    def step() -> None:
        native.copy_and_check(pushed, gradient)
        updater.update({"": values}, {"": pushed}, {"": {}}, 0, {"": pulled})

    return 1000 * min(common.timed(step) for _ in range(20))


def compare_slow(plot: Path | None) -> dict[str, Any]:
    undisturbed = slowed("async", 0.0)["fast"]
    pause = 9.0 / undisturbed  # nine times a step on top of one
    results = {mode: slowed(mode, pause) for mode in ("async", "bounded", "sync", "backup")}
    rows = [
        [mode, f"{run['fast']:,.0f}", f"{run['slow']:,.0f}", f"{run['fast'] / undisturbed:.2f}"]
        for mode, run in results.items()
    ]
    print(
        "\nOne of two workers is slowed 10 times; one run each. Undisturbed, a worker does "
        f"{undisturbed:,.0f} steps/s.\n"
    )
    print(common.table(["mode", "fast worker, steps/s", "slow worker", "fast worker / undisturbed"], rows))
    print("\n`backup` is mode sync with one backup worker: a step uses the first of two gradients.")
    if plot is not None and draw(results, plot):
        print(f"\n![Loss against time](results/{plot.name})")
    return {"undisturbed": undisturbed, **results}


def draw(results: dict[str, Any], target: Path) -> bool:
    """Draw the fast worker's loss by quarters of a second. Return False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        common.say("no plot: matplotlib is not installed")
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for mode, run in results.items():
        steps = run["steps"][0]
        seconds = np.array(steps["ends"]) - steps["start"]
        bins = (seconds / 0.25).astype(int)
        drawn = np.unique(bins)
        losses = np.array(steps["losses"])
        axes.plot((drawn + 0.5) * 0.25, [losses[bins == b].mean() for b in drawn], label=mode)
    axes.set(
        xlabel="seconds", ylabel="loss over an epoch so far", title="One of two workers slowed ten times"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    return True


def show_floor(ours: float, gradient_ms: float, carried_ms: float) -> dict[str, float]:
    """Print how near `ours`, in gradients a second, is to the floor of two cores, and return the floor."""
    per_second = 2 * 1000 / (gradient_ms + carried_ms)
    print(
        f"The floor: computing a gradient alone takes one core {gradient_ms:.2f} ms, moving it and updating "
        f"{carried_ms:.2f} ms. Two cores could do {per_second:,.1f} a second; insitu, async reaches "
        f"{ours / per_second:.2f} of that."
    )
    return {"gradient_ms": gradient_ms, "carried_ms": carried_ms, "per_second": per_second}


def compare_sizes(sizes: tuple[str, ...], rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for size in sizes:
        gradients: list[float] = []
        contenders = {
            "insitu, async": insitu(size, "async"),
            "insitu, sync": insitu(size, "sync"),
            "TensorFlow": tensorflow(size),
            "compute alone, 1 process": alone(size, gradients),
        }
        results = common.alternate(contenders, "gradients/s", rounds)
        parameters = models.PARAMETERS[size]
        table = common.results_table(results, "insitu, async", form="{:,.1f}".format)
        print(f"\n{size}: {parameters:,} parameters\n\n{table}")
        figures[size] = common.results_json(results)
        ours, keras = results["insitu, async"].median, results["compute alone, 1 process"].median
        if ours and keras:
            share = ours / (2 * keras)
            print(f"\ninsitu, async reaches {share:.2f} of the rate of two processes of Keras alone.")
            figures[size]["floor"] = show_floor(ours, 1000 / float(np.median(gradients)), carried(parameters))
    return figures


def main() -> None:
    made = common.parser(__doc__ or "")
    made.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="what to measure")
    made.add_argument("--plot", type=Path, default=None, metavar="FILE", help="PNG of loss against time")
    options = made.parse_args()
    plot = options.plot or (options.json.with_suffix(".png") if options.json else None)
    machine = common.machine()
    print(common.machine_line(machine))
    sizes = tuple(part for part in options.parts if part != "slow")
    if options.quick:
        os.environ.update(SMALL_STEPS="200", LARGE_STEPS="10")
    figures = compare_sizes(sizes, options.rounds or (1 if options.quick else 2))
    common.save_json(options.json, "parameter_server", machine, models=figures)
    if "slow" in options.parts:
        os.environ["SMALL_STEPS"] = "100" if options.quick else "500"
        figures["slow"] = compare_slow(plot)
    common.save_json(options.json, "parameter_server", machine, models=figures)


if __name__ == "__main__":
    main()
