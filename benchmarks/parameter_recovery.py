"""What a checkpoint of parameter servers, and the death of one, cost a worker that trains on them.

There are two servers and one worker in plain NumPy, each in its own process. The servers hold 5,824,522
dense parameters and a table of a million rows of 64 floats. A step looks up the rows of 4,096 keys drawn by
Zipf's law, pushes a gradient of these rows and of all parameters, and pulls the values. The optimizers are
plain gradient descent, and Adam with two slots for each parameter and each element of a row.

    checkpoint    `Client.checkpoint` of everything while steps continue: the duration of the step in which
                  the checkpoint begins and the servers stand still, and of the steps until it is on disk.
                  The longest of as many steps without a checkpoint shows how much the machine itself varies
    a server dies one of two servers with `backups=1` is killed: seconds from the kill to the end of the
                  next step, in which the mirror takes over

Each figure is the median of several.
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
DRAWS, EXPONENT, BATCHES = 4096, 1.05, 64
UPDATERS = ("sgd", "adam")
WARM_UP = 30
"""Steps."""
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

    def __init__(self, client: Any, servers: list[Any], rows: int) -> None:
        self.client, self.servers = client, servers
        self._sequence = 0
        self._keys = _batches(rows)
        self._gradients = np.full((DRAWS, WIDTH), 1e-6, np.float32)

    def step(self) -> float:
        """Seconds."""
        tables = None
        started = time.perf_counter()
        if self._keys:
            keys = self._keys[self._sequence % len(self._keys)]
            self.client.pull_rows("rows", keys).result()
            tables = {"rows": (keys, self._gradients[: len(keys)])}
        push = self.client.push(self._sequence, 16, tables=tables, defer_send=True, pull_follows=True)
        self.client.pull().result()
        push.result()
        self._sequence += 1
        return time.perf_counter() - started


def _batches(rows: int) -> list[Any]:
    """Distinct keys, ascending; the popular ones are anywhere."""
    if not rows:
        return []
    rng = np.random.default_rng(0)
    cumulated = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    place = rng.permutation(rows)
    drawn = (np.searchsorted(cumulated, rng.random(DRAWS) * cumulated[-1]) for _ in range(BATCHES))
    return [np.unique(place[ranks]) for ranks in drawn]


@contextlib.contextmanager
def training(backups: int, rows: int, updater: str = "sgd") -> Iterator[Training]:
    from insitu.parameters import Table, connect

    context, addresses = multiprocessing.get_context("spawn"), common.addresses(2)
    servers = [
        context.Process(target=_serve, args=(addresses, index, backups), daemon=True) for index in (0, 1)
    ]
    for server in servers:
        server.start()
    try:
        with connect(addresses, secret=SECRET, backups=backups) as client:
            client.define({name: (shape, "float32") for name, shape in SHAPES.items()}, updater=updater)
            client.define_tables([Table("rows", WIDTH, updater=updater)])
            for low in range(0, rows, BLOCK):
                client.pull_rows("rows", np.arange(low, min(rows, low + BLOCK))).result()
            client.flat_gradients()[...] = 1e-6
            yield Training(client, servers, rows)
    finally:
        for server in servers:
            server.kill()
            server.join()


def checkpoints(rows: int, rounds: int, updater: str) -> dict[str, Any]:
    """Seconds: of a step and of the longest of many, undisturbed; medians over checkpoints of a step in which
    one is begun, of the median and the longest step until it is on disk, and until that. Bytes of one."""
    began, usual, longest, written = [], [], [], []
    with training(0, rows, updater) as trained, tempfile.TemporaryDirectory() as folder:
        trained.client.expect_checkpoints()
        for _ in range(WARM_UP):
            trained.step()
        undisturbed = [trained.step() for _ in range(60)]
        for _ in range(rounds):
            started = time.perf_counter()
            future = trained.client.checkpoint(Path(folder))
            began.append(time.perf_counter() - started + trained.step())
            steps = []
            while not future.done():
                steps.append(trained.step())
            written.append(time.perf_counter() - started)
            usual.append(statistics.median(steps or [0.0]))
            longest.append(max(steps, default=0.0))
            undisturbed += [trained.step() for _ in steps]
        newest = max(Path(folder).glob("server-0/checkpoint-*")).name
        size = sum(file.stat().st_size for file in Path(folder).glob(f"server-*/{newest}/*"))
    figures = {"began": began, "until": usual, "longest": longest, "written": written}
    return {
        "step": statistics.median(undisturbed),
        "longest_undisturbed": max(undisturbed),
        **{name: statistics.median(values) for name, values in figures.items()},
        "figures": figures,
        "bytes": size,
    }


def deaths(rounds: int) -> list[float]:
    """Seconds from each kill to the end of the next step."""
    found = []
    for turn in range(rounds):
        with training(1, 0) as trained:
            deadline = time.monotonic() + SETTLED
            while not all(server["mirrored"] for server in trained.client.stats()):
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
    results = {}
    for updater in UPDATERS:
        results[updater] = one = checkpoints(10_000 if options.quick else ROWS, rounds, updater)
        size, seconds = one["bytes"] / 1e6, one["written"]
        print(f"{updater}, a checkpoint of {size:,.0f} MB on disk after {seconds:.2f} s\n")
        rows = [
            [what, f"{1000 * one[name]:.1f} ms", f"{one[name] / one['step']:.1f}"]
            for what, name in (
                ("a step, undisturbed", "step"),
                ("the longest of many, undisturbed", "longest_undisturbed"),
                ("a step and the beginning of a checkpoint", "began"),
                ("a step until it is on disk", "until"),
                ("the longest of these", "longest"),
            )
        ]
        print(common.table(["", "median", "steps"], rows) + "\n")
    found = deaths(rounds)
    print(f"The step in which a server dies: {statistics.median(found):.2f} s (at most {max(found):.2f}).")
    common.save_json(options.json, "parameter_recovery", machine, checkpoints=results, deaths=found)


if __name__ == "__main__":
    main()
