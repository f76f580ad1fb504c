"""One server's part in a checkpoint that is consistent over all servers.

chief                      each server
freeze                 ->  blocks changes from now on
                       <-  what it has applied; the furthest of each shard is the cut
checkpoint, cut        ->  lets changes before the cut through; at the cut, a thread begins to write
                           and all changes continue
                       <-  once the checkpoint is on disk
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.base.errors import InsituError, ParameterError
from insitu.parameters import snapshots
from insitu.parameters.checkpoints import CheckpointWriter
from insitu.parameters.connection import Connection
from insitu.parameters.rules import DENSE_STREAM, REPLY, Array, ConsistentCut, Message, make_failure
from insitu.parameters.server_state import ServerState

FREEZE_TIMEOUT = 10.0
"""Most seconds for which a server blocks changes."""
BLOCKED_OPERATIONS = frozenset({"push", "push_rows", "load_rows", "finish", "adjust", "define_table"})
"""Operations that wait while a server is frozen."""

WatchWriter = Callable[[CheckpointWriter, Callable[["InsituError | None"], None]], None]
"""Calls back with the outcome once a writer is done; see `EventLoop.watch_writer`."""


@dataclass(slots=True)
class _Freeze:
    """A freeze under way."""

    #: Connection of the worker that asked for it.
    coordinator: Connection
    #: Time on the monotonic clock at which the freeze ends, whatever else happens.
    deadline: float
    #: Requests that wait for its end, in order.
    blocked: list[tuple[Connection, Message]] = field(default_factory=list)
    #: The request for the checkpoint and its cut, once they came.
    request: tuple[Message, ConsistentCut] | None = None


class CheckpointBarrier:
    """Blocks changes of a server's state until it is at the cut, then has it written."""

    def __init__(
        self, state: ServerState, watch_writer: WatchWriter, checkpoint_key: bytes | None = None
    ) -> None:
        """`checkpoint_key` signs checkpoints (None: this user's key)."""
        self._state = state
        self._checkpoint_key = checkpoint_key
        self._watch_writer = watch_writer
        self._freeze: _Freeze | None = None
        self._writing = False
        self._checkpoints_expected = False
        #: Copies of the dense arrays, kept from one checkpoint to the next.
        self._copies: dict[str, Array] = {}

    def expect_checkpoints(self) -> None:
        """Allocate memory for the copies of dense arrays now, or as soon as they are defined."""
        self._checkpoints_expected = True
        self.allocate_copies()

    def allocate_copies(self) -> None:
        """Allocate memory for the copies, if checkpoints are expected. Call it after each definition."""
        if self._checkpoints_expected:
            snapshots.allocate_copies(self._state, self._copies)

    def freeze(self, connection: Connection, message: Message) -> dict[str, Any]:
        """Block changes from now on, and return what has been applied.

        A message with "thaw" ends the freeze instead, because another server couldn't be frozen. Raises
        ParameterError if a checkpoint is under way.
        """
        if message.meta.get("thaw"):
            if self._freeze is not None and self._freeze.coordinator is connection:
                self._freeze.deadline = 0.0
            return {}
        if self._freeze is not None or self._writing:
            raise ParameterError(
                "One checkpoint of the parameter servers can be written at a time. Received: a request while "
                "another one is still under way. Wait for its future before the next"
            )
        self._freeze = _Freeze(connection, time.monotonic() + FREEZE_TIMEOUT)
        applied = {stream: sorted(sequences.items()) for stream, sequences in self._applied().items()}
        state = self._state
        return {"applied": applied, "version": state.push_state.version, "number": state.last_checkpoint}

    def _applied(self) -> dict[str, Any]:
        streams = {DENSE_STREAM: self._state.push_state, **self._state.table_push_states}
        return {stream: state.applied for stream, state in streams.items()}

    def block_after_cut(self, connection: Connection, message: Message) -> bool:
        """Keep a request that changes what the checkpoint must not contain. Return whether it was kept."""
        freeze = self._freeze
        if freeze is None or message.meta.get("op") not in BLOCKED_OPERATIONS:
            return False
        if freeze.request is not None and _is_push_in(freeze.request[1], message):
            return False
        freeze.blocked.append((connection, message))
        return True

    def set_cut(self, connection: Connection, message: Message) -> list[tuple[Connection, Message]]:
        """Take the request for the checkpoint. Return the blocked requests, which must be handled again.

        Raises ParameterError unless the same worker has frozen this server.
        """
        freeze = self._freeze
        if freeze is None or freeze.coordinator is not connection:
            raise ParameterError(
                "A worker must freeze the servers before it asks for a checkpoint. Received: a request from "
                "another worker, or after the freeze had ended. Call Client.checkpoint again"
            )
        cut = ConsistentCut.from_json(message.meta)
        # Errors of the request must show now, not once the cut is reached.
        Path(str(message.meta["directory"]))
        cut.is_reached(self._state.policy.mode, self._state.push_state.version, self._applied())
        freeze.request = message, cut
        blocked, freeze.blocked = freeze.blocked, []
        return blocked

    def write_if_at_cut(self) -> list[tuple[Connection, Message]]:
        """Begin to write if the cut is reached. Return the blocked requests, to be handled then."""
        freeze, state = self._freeze, self._state
        if freeze is None or freeze.request is None:
            return []
        message, cut = freeze.request
        if not cut.is_reached(state.policy.mode, state.push_state.version, self._applied()):
            return []
        self._freeze = None
        state.last_checkpoint = cut.number
        directory = Path(str(message.meta["directory"]))
        try:
            snapshot = snapshots.begin_live_snapshot(state, self._copies)
            writer = CheckpointWriter(directory, cut.number, state.server, snapshot, self._checkpoint_key)
        except Exception as error:
            snapshots.end_live_snapshot(state)
            no_memory = ParameterError(
                "A checkpoint needs memory for a copy of the dense variables: none is left. Use more "
                "servers (--ps)"
            )
            failure = error if isinstance(error, InsituError) else no_memory
            freeze.coordinator.enqueue(make_failure(message.request, failure))
        else:
            self._writing = True
            self._watch_writer(writer, lambda error: self._finish(freeze.coordinator, message, error))
        return freeze.blocked

    def _finish(self, coordinator: Connection, message: Message, error: InsituError | None) -> None:
        self._writing = False
        snapshots.end_live_snapshot(self._state)
        if error is not None:
            coordinator.enqueue(make_failure(message.request, error))
        else:
            coordinator.enqueue(Message(REPLY, message.request, {"number": message.meta["number"]}))

    def expire(self, now: float, closed: Connection | None = None) -> list[tuple[Connection, Message]]:
        """End the freeze if the cut isn't reached in time or its worker's connection `closed`.

        Return the blocked requests, which must be handled then.
        """
        freeze = self._freeze
        if freeze is None or (now < freeze.deadline and freeze.coordinator is not closed):
            return []
        self._freeze = None
        if freeze.request is not None and freeze.coordinator is not closed:
            error = ParameterError(
                f"All servers must apply the same pushes within {FREEZE_TIMEOUT:g} s for a checkpoint: "
                f"server {self._state.server} hasn't, as when a worker dies in the middle of a push. "
                "Training continues; ask for the next checkpoint later"
            )
            freeze.coordinator.enqueue(make_failure(freeze.request[0].request, error))
        return freeze.blocked


def _is_push_in(cut: ConsistentCut, message: Message) -> bool:
    meta = message.meta
    if meta.get("op") not in ("push", "push_rows"):
        return False
    return cut.contains(str(meta.get("table", DENSE_STREAM)), meta["shard"], int(meta["sequence"]))
