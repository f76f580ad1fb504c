"""A moment that is the same on all servers, for a checkpoint, without stopping anybody for longer than that.

The chief asks all servers to freeze: they keep what is pushed from then on, unanswered, and say what they
have applied. Of each shard, the furthest that any of them has is the cut: pushes up to there are on their way
to the others too, and are let through. Once a server is at the cut, a thread of it begins to write what it
held then, and it goes on with what it kept. In mode sync the leader's version is the cut, and the others
follow its decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.errors import InsituError, ParameterError
from insitu.parameters import checkpoints, snapshots
from insitu.parameters.connection import Connection
from insitu.parameters.server_state import ServerState
from insitu.parameters.wire import Array, Message

PATIENCE = 10.0
"""Seconds for which a server stays frozen at most."""
KEPT = frozenset({"push", "push_rows", "load_rows", "finish", "adjust", "define_table"})
"""Operations that wait while it is."""

WriteBehind = Callable[[checkpoints.CheckpointWriter, Callable[[InsituError | None], None]], None]
Finish = Callable[[Connection, Message, InsituError | None], None]


@dataclass(slots=True)
class _Frozen:
    by: Connection
    until: float
    kept: list[tuple[Connection, Message]] = field(default_factory=list)
    wanted: Message | None = None
    """The request for a checkpoint, once the cut is known."""


class CheckpointBarrier:
    """One server's part in checkpoints."""

    def __init__(self, holdings: ServerState, write_behind: WriteBehind, finish: Finish) -> None:
        """`finish(connection, request, error)` answers a request for a checkpoint."""
        self._holdings = holdings
        self._write_behind = write_behind
        self._finish = finish
        self._frozen: _Frozen | None = None
        self._writing = False
        self._expected = False
        self._room: dict[str, Array] = {}
        """Copies of the dense arrays, kept from one checkpoint to the next."""

    def expect(self) -> None:
        """Checkpoints will come: makes room for copies now or, where nothing is defined yet, as it is."""
        self._expected = True
        self.make_room()

    def make_room(self) -> None:
        """To be called when something was defined."""
        if self._expected:
            snapshots.make_room(self._holdings, self._room)

    def freeze(self, connection: Connection, message: Message) -> dict[str, Any]:
        """What has been applied here. Raises ParameterError where a checkpoint is under way. A message to
        thaw takes it back, where another server couldn't."""
        if message.meta.get("thaw"):
            if self._frozen is not None and self._frozen.by is connection:
                self._frozen.until = 0.0
            return {}
        if self._frozen is not None or self._writing:
            raise ParameterError("A checkpoint of the parameter servers is still under way")
        self._frozen = _Frozen(connection, time.monotonic() + PATIENCE)
        holdings = self._holdings
        applied = {"": sorted(holdings.state.applied.items())}
        applied |= {name: sorted(state.applied.items()) for name, state in holdings.streams.items()}
        return {"applied": applied, "version": holdings.state.version, "number": holdings.checkpoints}

    def keeps(self, connection: Connection, message: Message) -> bool:
        """Whether a request waits, because it comes after the cut."""
        frozen = self._frozen
        if frozen is None or message.meta.get("op") not in KEPT:
            return False
        if frozen.wanted is not None and self._before_cut(frozen.wanted, message):
            return False
        frozen.kept.append((connection, message))
        return True

    def _before_cut(self, wanted: Message, message: Message) -> bool:
        meta = message.meta
        if meta.get("op") not in ("push", "push_rows"):
            return False
        cut = dict(wanted.meta["cut"].get(str(meta.get("table", "")), ()))
        return int(meta["sequence"]) <= int(cut.get(meta["shard"], -1))

    def want(self, connection: Connection, message: Message) -> list[tuple[Connection, Message]]:
        """The request for a checkpoint, with the cut; returns the requests that may go on at once."""
        frozen = self._frozen
        if frozen is None or frozen.by is not connection:
            raise ParameterError("A checkpoint must be prepared by freezing the servers, which takes turns")
        frozen.wanted = message
        kept, frozen.kept = frozen.kept, []
        return kept

    def look(self) -> list[tuple[Connection, Message]]:
        """Begins to write where the cut is reached; returns the requests that may go on then."""
        frozen = self._frozen
        if frozen is None or frozen.wanted is None or not self._at_cut(frozen.wanted):
            return []
        connection, message, number = frozen.by, frozen.wanted, int(frozen.wanted.meta["number"])
        self._frozen = None
        self._holdings.checkpoints = number

        def done(error: InsituError | None) -> None:
            self._writing = False
            snapshots.let_go(self._holdings)
            self._finish(connection, message, error)

        try:
            directory = Path(str(message.meta["directory"]))
            lasting = snapshots.keep(self._holdings, self._room)
            writing = checkpoints.CheckpointWriter(directory, number, self._holdings.server, lasting)
        except (InsituError, MemoryError) as error:
            snapshots.let_go(self._holdings)
            none_left = ParameterError("No memory is left to write a checkpoint from")
            self._finish(connection, message, error if isinstance(error, InsituError) else none_left)
        else:
            self._writing = True
            self._write_behind(writing, done)
        return frozen.kept

    def _at_cut(self, wanted: Message) -> bool:
        holdings = self._holdings
        if holdings.rules.mode == "sync" and holdings.state.version < int(wanted.meta["version"]):
            return False
        for stream, cut in wanted.meta["cut"].items():
            state = holdings.streams.get(stream) if stream else holdings.state
            if stream == "" and holdings.rules.mode == "sync":
                continue
            if state is None or any(state.applied.get(int(s), -1) < int(n) for s, n in cut):
                return False
        return True

    def give_up(self, now: float, gone: Connection | None = None) -> list[tuple[Connection, Message]]:
        """Thaws where the cut isn't reached in time, or who wanted it has gone; returns what goes on."""
        frozen = self._frozen
        if frozen is None or (now < frozen.until and frozen.by is not gone):
            return []
        self._frozen = None
        if frozen.wanted is not None and frozen.by is not gone:
            error = ParameterError(
                "A checkpoint was given up: what other servers have applied did not come here in time, as "
                "when a worker dies in the middle of a push. The next one will do"
            )
            self._finish(frozen.by, frozen.wanted, error)
        return frozen.kept
