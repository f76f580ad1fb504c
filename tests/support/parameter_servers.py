"""Parameter servers in threads of the test, or as processes, and clients of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from exchange_ranks import DEADLINE, SECRET, Rank, without_main
from free_ports import free_addresses

from insitu.parameters import Client, ParameterServer, checkpoints, connect

__all__ = [
    "DEADLINE",
    "MODEL",
    "ONES",
    "PLAIN",
    "SHAPES",
    "TRANSPORTS",
    "Gate",
    "Servers",
    "clients",
    "definitions",
    "gradients",
    "servers",
]

TRANSPORTS = ["shm", "tcp"]
SHAPES = {"kernel": (300, 7), "bias": (7,), "scale": ()}
ONES = np.ones(4, np.float32)
MODEL = {name: ((4,), "float32", np.zeros(4, np.float32)) for name in ("a", "b")}
PLAIN = {"name": "sgd", "learning_rate": 1.0}


def definitions(seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    """Return a model of three variables, by name: (shape, dtype, first values)."""
    rng = np.random.default_rng(seed)
    return {name: (shape, dtype, rng.normal(size=shape).astype(dtype)) for name, shape in SHAPES.items()}


def gradients(seed: int, dtype: str = "float32") -> dict[str, Any]:
    """Return a gradient of each variable of `definitions`."""
    return {name: values for name, (_, _, values) in definitions(seed + 100, dtype).items()}


class Gate:
    """Blocks the thread that writes arrays of a checkpoint until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        pieces = checkpoints._iterate_blocks

        def held_up(array: Any) -> Any:
            self.reached.set()
            assert self.open.wait(DEADLINE)
            return pieces(array)

        monkeypatch.setattr(checkpoints, "_iterate_blocks", held_up)


@contextlib.contextmanager
def servers(count: int = 1, *, secret: bytes = SECRET, **options: Any) -> Iterator[list[str]]:
    """Yield the addresses of `count` servers, each in a thread."""
    with contextlib.ExitStack() as stack:
        addresses = free_addresses(count)
        for index, address in enumerate(addresses):
            stack.enter_context(
                ParameterServer(address, index=index, addresses=addresses, secret=secret, **options)
            )
        yield addresses


@contextlib.contextmanager
def clients(addresses: Sequence[str], count: int = 1, **options: Any) -> Iterator[list[Client]]:
    """Yield `count` clients, by rank."""
    options = {"secret": SECRET, "timeout": DEADLINE, "stall_timeout": DEADLINE, **options}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(addresses, rank, **options)) for rank in range(count)]


def serve(pipe: Any, index: int, addresses: list[str], options: dict[str, Any]) -> None:
    """Serve in a process of its own: see `Servers`."""
    server = ParameterServer(addresses[index], index=index, addresses=addresses, secret=SECRET, **options)
    pipe.send(("ready", None))
    server.serve()


class Servers:
    """Servers in processes, each of which may be killed and started again."""

    def __init__(self, count: int, **options: Any) -> None:
        self.addresses = free_addresses(count)
        self._options = options
        self._running: dict[int, Rank] = {}

    def __enter__(self) -> Servers:
        for index in range(len(self.addresses)):
            self.start(index, wait=False)
        for rank in self._running.values():
            rank.receive()
        return self

    def start(self, index: int, *, wait: bool = True, **options: Any) -> None:
        with without_main():
            rank = Rank(serve, (index, self.addresses, {**self._options, **options}))
        self._running[index] = rank
        if wait:
            rank.receive()

    def kill(self, index: int) -> None:
        """Kill a server with SIGKILL. Returns once it has ended."""
        self._running.pop(index).end()

    def __exit__(self, *_: object) -> None:
        for rank in self._running.values():
            rank.end()
