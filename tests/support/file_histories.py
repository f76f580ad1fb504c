"""Histories of clients that use files at the same time while nodes, the head and answers fail.

All runs in this process over the real code of clients, names, repairs and stores; times are a hundredth of
the real ones. A history is right if the answers of all clients could have come about one after another, and
nothing that was acknowledged is lost or unreadable once all nodes are back.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from file_nodes import FileNodes
from linearizability import LOST, Call, find_order

from insitu.base.errors import InsituError
from insitu.cluster.client import open_files
from insitu.cluster.client.file_system import InsituFileSystem
from insitu.cluster.files import asking, names_client, names_guard, repairing, upkeep
from insitu.cluster.files import client as client_module
from insitu.cluster.files.upkeep import ManifestUpkeep

VOLUME = "v"
BLOCK = 10
"""Bytes of a block."""
PATHS = ("a", "b", "d/c")
_TIMES = (
    *((module, "HEDGE_SECONDS", 0.01) for module in (asking, client_module, names_client)),
    *((module, "CLIENT_SECONDS", 0.3) for module in (asking, client_module, names_client, repairing)),
    (asking, "SUSPECT_SECONDS", 0.05),
    (asking, "BUSY_SECONDS", 0.001),
    (names_client, "BUSY_SECONDS", 0.001),
    (names_client, "SECONDS", 0.05),
    (names_client, "RETRY_SECONDS", 0.002),
    (client_module, "VIEW_SECONDS", 0.01),
    (client_module, "FRESH_SECONDS", 0.0),
    (client_module, "PAUSE_SECONDS", 0.0),
    (names_guard, "_AGAIN_SECONDS", 0.0),
    (open_files, "BLOCK_BYTES", BLOCK),
    (upkeep, "WRITER_SECONDS", 0.3),
)
_TRIES = 50
"""How often something is done again that a busy machine doesn't do in time."""
State = frozenset[tuple[str, bytes]]


def step(state: State, asked: tuple[Any, ...]) -> tuple[State, Any]:
    """Return what files are after an operation, and its answer, as one file system with a lock has it."""
    files = dict(state)
    match asked:
        case "write", path, data:
            files[path], answer = data, "done"
        case "append", path, data:
            files[path], answer = files.get(path, b"") + data, "done"
        case "read", path:
            answer = files.get(path, "missing")
        case "remove", path:
            answer = "missing" if files.pop(path, None) is None else "done"
        case "move", source, target:
            answer = "done" if source in files else "missing"
            if source in files:
                files[target] = files.pop(source)
        case _:
            raise AssertionError(asked)
    return frozenset(files.items()), answer


class _Half(set[str]):
    """Kinds of calls of which every second answer is lost, by drawn numbers."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        super().__init__({kind})
        self._rng = rng

    def __contains__(self, kind: object) -> bool:
        return super().__contains__(kind) and self._rng.random() < 0.5


class Trial:
    """One history. `calls` are what clients have asked for; `faults` counts what has failed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calls: list[Call] = []
        self.faults: dict[str, int] = {}
        self.lab = FileNodes(folder, ("a", "b", "c", "d"))
        self._lock = threading.Lock()
        self._running = 0

    def play(self, clients: int, operations: int) -> None:
        """Have clients use files while faults come and go, then end all faults, and read each file."""
        threads = [
            threading.Thread(target=self._be_client, args=(self.rng.getrandbits(64), operations))
            for _ in range(clients)
        ]
        self._running = clients
        for thread in threads:
            thread.start()
        upkeep = self._make_upkeep()
        while self._running:
            self._fail()
            with contextlib.suppress(InsituError, OSError):
                upkeep()
        for thread in threads:
            thread.join()
        self._heal()
        self._repair(upkeep)
        system = self._open()
        for path in PATHS:
            answered = (self._do(system, ("read", path)) is not LOST for _ in range(_TRIES))
            assert any(answered), f"{path} can't be read"

    def _repair(self, upkeep: Callable[[], None]) -> None:
        """Have copies made by nodes that all are there, as often as it takes on a busy machine."""
        for left in reversed(range(_TRIES)):
            try:
                upkeep()
            except (InsituError, OSError):
                if not left:
                    raise
            else:
                return

    def explain(self) -> bool:
        """Return whether the answers can have come about one after another."""
        return find_order(self.calls, frozenset(), step) is not None

    def _open(self) -> InsituFileSystem:
        system = InsituFileSystem(home=str(self.lab.folder))
        system._cluster, system.client = self.lab.open_cluster(), self.lab.connect()
        return system

    def _be_client(self, seed: int, operations: int) -> None:
        rng, system = random.Random(seed), self._open()
        try:
            for _ in range(operations):
                self._do(system, self._draw(rng))
        finally:
            with self._lock:
                self._running -= 1

    @staticmethod
    def _draw(rng: random.Random) -> tuple[Any, ...]:
        kind = rng.choices(("write", "append", "read", "remove", "move"), (5, 5, 6, 1, 2))[0]
        path, other = rng.sample(PATHS, 2)
        if kind in ("write", "append"):
            return kind, path, b"%016x" % rng.getrandbits(64)
        return (kind, path, other) if kind == "move" else (kind, path)

    def _do(self, system: InsituFileSystem, asked: tuple[Any, ...]) -> Any:
        begin = time.monotonic()
        answer: Any
        try:
            answer = _ask(system, asked)
        except FileNotFoundError:
            answer = "missing"
        except (InsituError, OSError):
            answer = LOST
        if answer is not LOST or asked[0] != "read":  # a read that was lost says nothing
            with self._lock:
                self.calls.append(Call(asked, answer, begin, time.monotonic()))
        return answer

    # Faults

    def _make_upkeep(self) -> Callable[[], None]:
        lab = self.lab
        manifests = ManifestUpkeep(lab.metadata, lab.client, lab.peers)
        repairer = lab.repairer(0.1)

        def upkeep() -> None:
            lab.repair(VOLUME, repairer)
            lab.collect_garbage(repairer)
            manifests.advance(lab.view(), 0.0, at_once=True)

        return upkeep

    def _fail(self) -> None:
        """Have something fail, or end what has failed."""
        lab, rng = self.lab, self.rng
        kind = rng.choice(("silent", "down", "headless", "busy", "losing", "away", "heal", "heal"))
        self.faults[kind] = self.faults.get(kind, 0) + 1
        node = rng.choice(lab.nodes)
        match kind:
            case "silent":
                lab.silent = {node}
            case "down":
                lab.down = {node}
            case "away":
                lab.alive = set(lab.nodes) - {node}
            case "headless":
                lab.headless = set(rng.sample(lab.nodes, rng.randrange(1, 5)))
            case "busy":
                lab.busy = {each: rng.randrange(4) for each in lab.nodes}
            case "losing":
                kind = rng.choice(("publish", "publish", "put", "get", "rename", "remove", "look"))
                lab.losing = rng.choice(({kind}, _Half(kind, random.Random(rng.random()))))
            case "heal":
                self._heal()
        time.sleep(rng.random() * rng.choice((0.01, 0.02, 0.5)))

    def _heal(self) -> None:
        lab = self.lab
        lab.silent, lab.down, lab.headless, lab.losing = set(), set(), set(), set()
        lab.busy, lab.alive = {}, set(lab.nodes)


def _ask(system: InsituFileSystem, asked: tuple[Any, ...]) -> Any:
    match asked:
        case "write", path, data if data[-1] % 2:
            system.pipe(f"{VOLUME}/{path}", data)
        case "write", path, data:  # by a slow writer
            with system.open(f"{VOLUME}/{path}", "wb") as file:
                file.write(data[:BLOCK])
                time.sleep(0.3)
                file.write(data[BLOCK:])
        case "append", path, data:
            with system.open(f"{VOLUME}/{path}", "ab") as file:
                file.write(data)
        case "read", path:
            return system.cat(f"{VOLUME}/{path}")
        case "remove", path:
            system.client.remove(VOLUME, path, recursive=False)
        case "move", source, target:
            system.client.rename(VOLUME, source, target)
    return "done"


@contextlib.contextmanager
def hurry() -> Iterator[None]:
    """Wait for a hundredth of the times."""
    with contextlib.ExitStack() as stack:
        for module, name, seconds in _TIMES:
            stack.enter_context(patch.object(module, name, seconds))
        yield
