"""Runs each rank of a group as a real process, or as a thread where many small groups are wanted."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from free_ports import free_addresses

DEADLINE = 60.0
SECRET = b"the secret of a test"


class Rank:
    """One process that runs a function. Both sides send messages through a pipe."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.arguments = arguments
        here, there = _context().Pipe()
        self._pipe: Connection = here
        self.process = _context().Process(target=_main, args=(there, function, *arguments), daemon=True)
        self.process.start()
        there.close()
        self.pid = self.process.pid

    def receive(self) -> Any:
        """Return the next message of the process. Raise the exception that it ended with."""
        if not self._pipe.poll(DEADLINE):
            raise TimeoutError(f"rank process {self.pid} sent nothing for {DEADLINE} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise value
        return value

    def send(self, value: Any) -> None:
        """Send a message to the process."""
        self._pipe.send(value)

    def result(self) -> Any:
        """Return the result of the function once it has ended."""
        value = self.receive()
        self.process.join(DEADLINE)
        return value

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(DEADLINE)
        self._pipe.close()
        self.process.close()


@functools.cache
def _make_short_folder() -> str:
    folder = tempfile.mkdtemp(prefix="insitu-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _context() -> Any:
    # The server listens at a path below TMPDIR, which may be too long for an address.
    multiprocessing.current_process()._config.setdefault("tempdir", _make_short_folder())  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "insitu.exchange.joining", "insitu.exchange.tcp"])
    return context


def _main(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        pipe.send(("result", function(pipe, *arguments)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", error))
    finally:
        sys.stdout.flush()


@contextlib.contextmanager
def ranks(
    count: int, function: Callable[..., Any], *arguments: Any, host: str = "127.0.0.1"
) -> Iterator[list[Rank]]:
    """`count` processes that run `function(pipe, rank, addresses, *arguments)`; none is left behind."""
    addresses = free_addresses(count, host)
    started: list[Rank] = []
    with without_main():
        try:
            started.extend(Rank(function, (rank, addresses, *arguments)) for rank in range(count))
            yield started
        finally:
            for rank in started:
                rank.end()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Keeps multiprocessing from importing the test runner once more in each process."""
    main = sys.modules["__main__"]
    saved = {name: main.__dict__.pop(name) for name in ("__spec__", "__file__") if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(saved)


def in_threads(count: int, function: Callable[[int, list[str]], Any]) -> list[Any]:
    """What `function(rank, addresses)` returned on each rank, each a thread. Raises the first exception."""
    addresses = free_addresses(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(rank, addresses)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
