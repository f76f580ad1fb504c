"""What a checkpoint of parameter servers and the death of one cost a worker that trains on them.

Two servers and one worker of plain NumPy, each a process. The servers hold 5,824,522 dense parameters and a
table of a million rows of 64 floats. A step pushes a gradient of all parameters and pulls the values.

    checkpoint    `Client.checkpoint` of everything, while steps go on: how long the step takes in which it
                  begins and the servers stand still, and the longest one until it is on disk
    a server dies one of two servers with `backups=1` is killed: seconds from the kill to the end of the first
                  step afterwards, in which the mirror takes over

One process for each; each figure is the median of several.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np

SHAPES = {"a": (784, 2048), "b": (2048, 2048), "c": (2048, 10)}
ROWS, WIDTH, BLOCK = 1_000_000, 64, 1 << 16
SECRET = b"benchmark"
SETTLED = 30.0
"""Seconds in which a mirror has a copy of everything."""


def _serve(addresses: list[str], index: int, backups: int) -> None:
    from insitu.parameters import ParameterServer

    ParameterServer(
        addresses[index], index=index, addresses=addresses, secret=SECRET, backups=backups
    ).serve()


class Training:
    """A worker with its servers: `step()` trains one, `servers` are their processes."""

    def __init__(self, client: Any, servers: list[Any]) -> None:
        self.client, self.servers = client, servers
        self._sequence = 0

    def step(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        push = self.client.push(self._sequence, 16, hold=True, pulls=True)
        self.client.pull().result()
        push.result()
        self._sequence += 1
        return time.perf_counter() - started


@contextlib.contextmanager
def training(backups: int, rows: int) -> Iterator[Training]:
    from insitu.parameters import Table, connect

    context, addresses = multiprocessing.get_context("spawn"), common.addresses(2)
    servers = [
        context.Process(target=_serve, args=(addresses, index, backups), daemon=True) for index in (0, 1)
    ]
    for server in servers:
        server.start()
    try:
        with connect(addresses, secret=SECRET, backups=backups) as client:
            client.define({name: (shape, "float32") for name, shape in SHAPES.items()})
            client.define_tables([Table("rows", WIDTH)])
            for low in range(0, rows, BLOCK):
                client.pull_rows("rows", np.arange(low, min(rows, low + BLOCK))).result()
            client.flat_gradients()[...] = 1e-6
            yield Training(client, servers)
    finally:
        for server in servers:
            server.kill()
            server.join()


def checkpoints(rows: int, rounds: int) -> dict[str, Any]:
    """Medians over checkpoints: seconds of a step, of one that a checkpoint is begun in, of the longest until
    it is on disk, and until that."""
    began, longest, written = [], [], []
    with training(0, rows) as trained, tempfile.TemporaryDirectory() as folder:
        usual = statistics.median(trained.step() for _ in range(40))
        for _ in range(rounds):
            started = time.perf_counter()
            future = trained.client.checkpoint(Path(folder))
            began.append(time.perf_counter() - started + trained.step())
            steps = []
            while not future.done():
                steps.append(trained.step())
            longest.append(max(steps, default=0.0))
            written.append(time.perf_counter() - started)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    medians = {
        n: statistics.median(v) for n, v in (("began", began), ("longest", longest), ("written", written))
    }
    return {"step": usual, **medians, "figures": [began, longest, written], "bytes": size}


def deaths(rounds: int) -> list[float]:
    """Seconds from each kill to the end of the next step."""
    found = []
    for turn in range(rounds):
        with training(1, 0) as trained:
            deadline = time.monotonic() + SETTLED
            while not all(told["mirrored"] for told in trained.client.stats()):
                if time.monotonic() > deadline:
                    raise SystemExit("The servers didn't become mirrors of each other")
                trained.step()
            for _ in range(5):
                trained.step()
            trained.servers[turn % 2].kill()
            found.append(trained.step())
    return found


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = common.machine()
    print(common.machine_line(machine) + "\n")
    rounds = options.rounds or (1 if options.quick else 5)
    told = checkpoints(10_000 if options.quick else ROWS, rounds)
    step = told["step"]
    found = deaths(rounds)
    rows = [
        ["a step, undisturbed", f"{1000 * step:.1f} ms", "1.0"],
        [
            "a step and the beginning of a checkpoint",
            f"{1000 * told['began']:.1f} ms",
            f"{told['began'] / step:.1f}",
        ],
        [
            "the longest step until it is on disk",
            f"{1000 * told['longest']:.1f} ms",
            f"{told['longest'] / step:.1f}",
        ],
        [f"until it is on disk, {told['bytes'] / 1e6:,.0f} MB", f"{told['written']:.2f} s", ""],
        [
            "the step in which a server dies",
            f"{statistics.median(found):.2f} s (at most {max(found):.2f})",
            "",
        ],
    ]
    print(common.table(["", "median", "steps"], rows))
    common.save_json(options.json, "parameter_recovery", machine, checkpoint=told, deaths=found)


if __name__ == "__main__":
    main()
