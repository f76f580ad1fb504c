"""Parameter servers beside TensorFlow's: updates per second of all workers, 2 workers and 1 server.

  insitu, async / sync    ParameterServerStrategy, Keras 3 on TensorFlow, through `fit`
  TensorFlow              tf.distribute.ParameterServerStrategy with ClusterCoordinator, a bare step
  compute alone           Keras alone, one process on one core: twice that is the floor of two workers

Two dense models, of 55,050 and 5,824,522 parameters, plain gradient descent, 16 rows a step and worker. The
computing is part of the figure. `--slow` slows one of two workers ten times and tells what the other does, by
mode; with `--plot FILE` it draws the loss against time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

PEERS = Path(__file__).parent / "parameter_server_peers"
PATIENCE = 240.0


def addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@contextlib.contextmanager
def tasks(script: str, roles: dict[str, int], *arguments: str) -> Iterator[dict[str, Any]]:
    """One process for each task, by name; all are ended afterwards."""
    cluster = {role: addresses(count) for role, count in roles.items()}
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


def rate(text: str) -> float:
    found = re.search(r"RATE ([\d.]+)", text)
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


def alone(size: str) -> Callable[[], float]:
    def run() -> float:
        with tasks("compute_task.py", {"worker": 1}, size) as started:
            return rate(output_of(started["worker:0"]))

    return run


def slowed(mode: str, seconds: float) -> dict[str, Any]:
    """Both workers' steps per second where worker 1 waits so long in each step."""
    with tasks("insitu_task.py", {"ps": 1, "worker": 2}, "small", mode, "1", str(seconds)) as started:
        texts = [output_of(started[f"worker:{index}"]) for index in (0, 1)]
    steps = [json.loads(re.search(r"STEPS (.*)", text)[1]) for text in texts]  # type: ignore[index]
    return {"fast": rate(texts[0]), "slow": rate(texts[1]), "steps": steps}


def compare_slow(plot: Path | None) -> dict[str, Any]:
    undisturbed = slowed("async", 0.0)["fast"]
    pause = 9.0 / undisturbed  # nine times a step on top of one
    told = {mode: slowed(mode, pause) for mode in ("async", "bounded", "sync")}
    rows = [
        [mode, f"{run['fast']:,.0f}", f"{run['slow']:,.0f}", f"{run['fast'] / undisturbed:.2f}"]
        for mode, run in told.items()
    ]
    print(f"\nOne of two workers slowed 10 times; undisturbed: {undisturbed:,.0f} steps/s of a worker\n")
    print(
        common.table(["mode", "fast worker, steps/s", "slow worker", "fast one's share of undisturbed"], rows)
    )
    if plot is not None:
        draw(told, plot)
    return {"undisturbed": undisturbed, **told}


def draw(told: dict[str, Any], target: Path) -> None:
    import matplotlib.pyplot as plt

    for mode, run in told.items():
        steps = run["steps"][0]
        plt.plot([end - steps["start"] for end in steps["ends"]], steps["losses"], label=mode)
    plt.xlabel("seconds")
    plt.ylabel("loss of the fast worker's rows")
    plt.legend()
    plt.savefig(target)


def main() -> None:
    made = common.parser(__doc__ or "")
    made.add_argument("--slow", action="store_true", help="only the comparison with a slowed worker")
    made.add_argument(
        "--plot", type=Path, default=None, metavar="FILE", help="loss against time, with --slow"
    )
    options = made.parse_args()
    rounds = options.rounds or (1 if options.quick else 2)
    machine = common.machine()
    print(common.machine_line(machine))
    figures: dict[str, Any] = {}
    for size in () if options.slow else ("small", "large"):
        contenders = {
            "insitu, async": insitu(size, "async"),
            "insitu, sync": insitu(size, "sync"),
            "TensorFlow": tensorflow(size),
            "compute alone, 1 process": alone(size),
        }
        results = common.alternate(contenders, "gradients/s", rounds)
        table = common.results_table(results, "insitu, async", form="{:,.1f}".format)
        print(f"\n{size}\n\n{table}")
        figures[size] = common.results_json(results)
    if options.slow:
        figures["slow"] = compare_slow(options.plot)
    common.save_json(options.json, "parameter_server", machine, models=figures)


if __name__ == "__main__":
    main()
