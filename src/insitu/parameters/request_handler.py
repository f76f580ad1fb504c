"""What a server does with each request. Requests that can't be answered yet wait here, and hold up no other.

Nothing here owns a socket: the server's loop brings messages and takes replies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError, InsituError, ParameterError, ServerStalled
from insitu.parameters import modes, native, sharding_plan
from insitu.parameters.connection import Connection
from insitu.parameters.consistent_cut import CheckpointBarrier, WriteBehind
from insitu.parameters.modes import PushEvent
from insitu.parameters.server_state import Ahead, Gradients, Resolved, ServerState
from insitu.parameters.sharding_plan import ShardingPlan, as_dtype
from insitu.parameters.tables import Table
from insitu.parameters.wire import FAILURE, REPLY, MalformedMessage, Message, error_meta

Array = NDArray[Any]
Answer = tuple[dict[str, Any], Sequence[Array]]
"""A reply's description and arrays."""

CHANGES = frozenset(
    {
        *("define", "define_table", "initialise", "push", "push_rows", "decided", "finish", "load_rows"),
        *("adjust", "finalize"),
    }
)
"""Operations that change what a server holds: a mirror is told of each."""
_LOG = logging.getLogger("insitu")
_EXPECTED = (InsituError, KeyError, TypeError, ValueError, IndexError, MemoryError, OverflowError)
_TOLD = 4
"""Decisions that the leader tells with each answer; see `modes.Decided`."""


@dataclass(slots=True)
class Waiting:
    """A request that can't be answered yet. `deadline` on the monotonic clock."""

    connection: Connection
    message: Message
    deadline: float


class RequestHandler:
    """The requests to one server's holdings. Not for several threads."""

    def __init__(
        self,
        holdings: ServerState,
        stall_timeout: float,
        changed: Callable[[Message], int | None],
        write_behind: WriteBehind,
    ) -> None:
        """`changed(message)` is called after each change with its request, and says on which of its own
        numbers the answers must wait (`release`), or None. `write_behind` looks after checkpoints."""
        self.holdings = holdings
        self.mirrored = False
        """Whether a mirror has all of it."""
        self._stall_timeout = stall_timeout
        self._changed = changed
        self._freezer = CheckpointBarrier(holdings, write_behind, self._checkpointed)
        self._waiting: list[Waiting] = []
        self._pushers: dict[tuple[int, int], list[Waiting]] = {}
        self._operations: dict[str, Callable[[Connection, Message], Answer | None]] = {
            name: getattr(self, f"_{name}")
            for name in (
                *CHANGES,
                *("attach", "pull", "pull_rows", "last_applied", "stats", "read_rows", "hello"),
                *("expect_checkpoints", "freeze", "checkpoint"),
            )
        }
        self._retained: dict[int, list[tuple[Connection, Message]]] = {}
        """Answers that wait for the mirror, by the number of the change."""
        self._hold: int | None = None
        self._scratch: dict[str, Array] = {}
        """By group: where the parts of a push are put together."""

    # Requests

    def handle(self, connection: Connection, message: Message) -> None:
        """Answers a request, now or later."""
        if self._freezer.keeps(connection, message):
            return
        operation = message.meta.get("op")
        handler = self._operations.get(operation) if isinstance(operation, str) else None
        if handler is None:
            self._fail(connection, message, ParameterError(f"A server knows no operation {operation!r}"))
            return
        self._hold = None
        try:
            answer = handler(connection, message)
        except MalformedMessage:
            raise
        except _EXPECTED as error:
            self._fail(connection, message, error)
        else:
            if answer is not None:
                self._answer(connection, message, *answer)
        if operation in CHANGES:
            self._look_again()
        self._hold = None
        for kept in self._freezer.look():
            self.handle(*kept)

    def replicate(self, connection: Connection, message: Message) -> None:
        """On a mirror: makes a change that the primary has made, and says so."""
        handler = self._operations.get(str(message.meta.get("op")))
        if handler is not None:
            try:
                handler(connection, message)
            except _EXPECTED as error:
                _LOG.error("The mirror of server %d can't follow: %s", self.holdings.server, error)
                raise
        self._pushers.clear()
        self._hold = None
        self._post(connection, Message(REPLY, message.request, {}))

    def tick(self, now: float) -> None:
        """Gives up requests that have waited too long; call now and then."""
        for kept in self._freezer.give_up(now):
            self.handle(*kept)
        late = [w for w in self._waiting if w.deadline <= now]
        self._waiting = [w for w in self._waiting if w.deadline > now]
        for key, waiting in list(self._pushers.items()):
            late += [w for w in waiting if w.deadline <= now]
            self._pushers[key] = [w for w in waiting if w.deadline > now]
        for entry in late:
            self._fail(entry.connection, entry.message, self._stalled(entry.message))

    def forget(self, connection: Connection) -> None:
        """Nobody waits on this connection any more."""
        for kept in self._freezer.give_up(0.0, connection):
            if kept[0] is not connection:
                self.handle(*kept)
        self._waiting = [w for w in self._waiting if w.connection is not connection]
        for key, waiting in list(self._pushers.items()):
            left = [w for w in waiting if w.connection is not connection]
            if left:
                self._pushers[key] = left
            else:
                del self._pushers[key]

    def abandon(self, error: InsituError) -> None:
        """Tells everybody who waits that this server doesn't hold the state any more."""
        waiting, self._waiting = self._waiting, []
        for pushers in self._pushers.values():
            waiting += pushers
        self._pushers = {}
        held, self._retained = self._retained, {}
        for entry in waiting:
            self._fail(entry.connection, entry.message, error)
        for answers in held.values():
            for connection, message in answers:
                self._post(connection, Message(FAILURE, message.request, dict(error_meta(error))))

    def release(self, number: int | None) -> None:
        """Sends the answers that waited for the mirror to have all changes to this number; None: all."""
        for at in sorted(self._retained):
            if number is None or at <= number:
                for connection, message in self._retained.pop(at):
                    self._post(connection, message)

    def _stalled(self, message: Message) -> ServerStalled:
        holdings, shard = self.holdings, message.meta.get("shard")
        awaited = modes.awaited(holdings.rules, holdings.state, shard if isinstance(shard, int) else None)
        what = f"pushes of shards {awaited}" if holdings.initialised else "the chief's first values"
        return ServerStalled(
            f"Server {holdings.server} waited {self._stall_timeout:g} s at version {holdings.state.version} "
            f"for {what}"
        )

    def _wait(self, connection: Connection, message: Message) -> Waiting:
        return Waiting(connection, message, time.monotonic() + self._stall_timeout)

    def _answer(
        self, connection: Connection, message: Message, meta: dict[str, Any], arrays: Sequence[Array] = ()
    ) -> None:
        reply = Message(REPLY, message.request, meta, arrays)
        if self._hold is not None:
            self._retained.setdefault(self._hold, []).append((connection, reply))
        else:
            self._post(connection, reply)

    def _fail(self, connection: Connection, message: Message, error: Exception) -> None:
        if not isinstance(error, InsituError):
            error = InputError(f"A request can't be understood: {type(error).__name__}: {error}")
        self._post(connection, Message(FAILURE, message.request, dict(error_meta(error))))

    @staticmethod
    def _post(connection: Connection, reply: Message) -> None:
        connection.put(reply)

    def _look_again(self) -> None:
        """Answers those whose waiting is over."""
        waiting, self._waiting = self._waiting, []
        self._hold = None
        for entry in waiting:
            answer = self._try_pull(entry.connection, entry.message)
            if answer is None:
                self._waiting.append(entry)
            else:
                self._answer(entry.connection, entry.message, *answer)

    def _resolve(self, resolved: Sequence[Resolved]) -> None:
        """Answers the pushes that something became of."""
        for item in resolved:
            for entry in self._pushers.pop((item.push.shard, item.push.sequence), ()):
                self._answer(entry.connection, entry.message, self._outcome(item))

    def _outcome(self, item: Resolved) -> dict[str, Any]:
        return {"outcome": item.outcome, "version": item.version, "decisions": self._decisions()}

    def _decisions(self) -> list[Any]:
        return list(self.holdings.state.decisions[-_TOLD:]) if self.holdings.rules.mode == "sync" else []

    # Definition

    def _hello(self, connection: Connection, message: Message) -> Answer:
        holdings = self.holdings
        rules = holdings.rules
        return {
            "server": holdings.server,
            "mode": rules.mode,
            "total_replicas": rules.total_replicas,
            "version": holdings.state.version,
            "defined": holdings.layout is not None,
        }, ()

    def _attach(self, connection: Connection, message: Message) -> Answer:
        meta = message.meta
        process = int(connection.context["process"])
        connection.attach(int(meta["segment"]), process, int(meta["descriptor"]), int(meta["size"]))
        return {}, ()

    def _define(self, connection: Connection, message: Message) -> Answer:
        layout = sharding_plan.from_json(message.meta["layout"])
        self.holdings.define(layout, message.meta["updater"], message.meta["layout"])
        self._freezer.make_room()
        self._hold = self._changed(message)
        return {"initialised": self.holdings.initialised, "version": self.holdings.state.version}, ()

    def _define_table(self, connection: Connection, message: Message) -> Answer:
        self.holdings.define_table(Table.from_json(message.meta["table"]))
        self._hold = self._changed(message)
        return {}, ()

    def _initialise(self, connection: Connection, message: Message) -> Answer:
        gradients = self._dense(connection, message, message.arrays)
        self._change(message, gradients)
        self.holdings.initialise(gradients)
        return {}, ()

    def _change(self, message: Message, dense: Mapping[str, Array] | None = None, rows: Any = ()) -> None:
        """Tells the mirror of a change, with all its numbers in the message itself."""
        own = ("at", "segment", "ahead")  # the worker's memory
        meta = {k: v for k, v in message.meta.items() if k not in own} | {"flat": True}
        arrays = [*(dense or {}).values(), *(array for pair in rows for array in pair)]
        self._hold = self._changed(Message(message.kind, message.request, meta, arrays))

    # Dense

    def _dense(self, connection: Connection, message: Message, arrays: Sequence[Array]) -> dict[str, Array]:
        """The server's own elements of each group that a message brings: in shared memory ("at" says where
        each group begins in a segment), or as arrays of the message: one for each span of each group, or one
        for each group ("flat")."""
        holdings = self.holdings
        layout = holdings.layout
        if layout is None:
            raise InputError("Variables must be defined before anything else is done with them")
        at = message.meta.get("at")
        found, used = {}, 0
        for position, group in enumerate(layout.groups):
            spans = layout.spans(holdings.server, group)
            if at is not None:
                parts = self._spans(connection, message, position, group)
            else:
                count = 1 if message.meta.get("flat") else len(spans)
                parts = [array.reshape(-1) for array in arrays[used : used + count]]
                used += count
            found[group] = self._joined(parts, group)
        return found

    def _joined(self, parts: Sequence[Array], group: str) -> Array:
        """The parts as one flat array; a view where there is but one. In mode sync, where it may be held, it
        is a new one, otherwise the same for each push."""
        dtype = as_dtype(group)
        if any(part.dtype != dtype for part in parts):
            found = ", ".join(sorted({part.dtype.name for part in parts}))
            raise InputError(f"A push of {dtype.name} variables must be {dtype.name}. Received: {found}")
        if len(parts) == 1:
            return parts[0]
        size = sum(part.size for part in parts)
        whole = self._scratch.get(group)
        if whole is None or whole.size != size or self.holdings.rules.mode == "sync":
            whole = self._scratch[group] = np.empty(size, dtype)
        return np.concatenate(parts, out=whole) if parts else whole

    def _spans(
        self, connection: Connection, message: Message, position: int, group: str, at: str = "at"
    ) -> list[Array]:
        """Views of the server's own parts of a group's buffer in a worker's shared memory."""
        where = (self.holdings.server, int(message.meta["segment"]), int(message.meta[at][position]), group)
        if where not in connection.views:
            connection.views[where] = self._make_spans(connection, where[1], where[2], group)
        found: list[Array] = connection.views[where]
        return found

    def _make_spans(self, connection: Connection, number: int, start: int, group: str) -> list[Array]:
        layout, dtype = self.holdings.layout, as_dtype(group)
        segment = connection.segments.get(number)
        if layout is None or segment is None:
            raise InputError("A message speaks of shared memory that was never shown")
        size = layout.sizes[group]
        memory = segment.array()
        if start < 0 or start % dtype.itemsize or start + size * dtype.itemsize > memory.size:
            raise InputError(f"A buffer of {size} {group} at {start} lies outside of {memory.size} bytes")
        whole = memory[start : start + size * dtype.itemsize].view(dtype)
        return [whole[s.offset : s.offset + s.size] for s in layout.spans(self.holdings.server, group)]

    def _push(self, connection: Connection, message: Message) -> Answer | None:
        meta, holdings = message.meta, self.holdings
        push = PushEvent(int(meta["shard"]), int(meta["sequence"]), int(meta["step"]), int(meta["rows"]))
        names = [str(name) for name in meta.get("tables", ())]
        split = len(message.arrays) - 2 * len(names)
        dense = self._dense(connection, message, message.arrays[:split]) if meta.get("dense") else {}
        pairs = [
            (message.arrays[split + 2 * i], message.arrays[split + 2 * i + 1]) for i in range(len(names))
        ]
        rows = dict(zip(names, pairs, strict=True))
        gradients = Gradients(dense, rows, finite=meta.get("finite") is True)
        ahead = self._ahead(connection, message) if dense and "ahead" in meta else None
        resolved = holdings.push(push, gradients, time.monotonic(), ahead)
        connection.written = None if ahead is None else (meta["segment"], meta["ahead"], ahead.version)
        self._change(message, dense, pairs)
        own = [item for item in resolved if item.push.shard == push.shard]
        if own:
            self._resolve([item for item in resolved if item.push.shard != push.shard])
            return self._outcome(own[-1]), ()
        if not holdings.rules.leads:
            return {"outcome": "held", "version": holdings.state.version}, ()
        key = (push.shard, push.sequence)
        self._pushers.setdefault(key, []).append(self._wait(connection, message))
        return None

    def _ahead(self, connection: Connection, message: Message) -> Ahead | None:
        """Where the worker wants the values that it will pull next."""
        layout, server = self.holdings.layout, self.holdings.server
        if layout is None:
            return None
        parts = {}
        for position, group in enumerate(layout.groups):
            views = self._spans(connection, message, position, group, "ahead")
            starts = [span.own for span in layout.spans(server, group)]
            parts[group] = list(zip(starts, views, strict=True))
        return Ahead(parts)

    def _decided(self, connection: Connection, message: Message) -> Answer:
        self._follow(message.meta["decisions"], message)
        return {"version": self.holdings.state.version}, ()

    def _follow(self, decisions: Any, message: Message) -> None:
        for step, shards in decisions:
            if int(step) >= self.holdings.state.version and not self.holdings.rules.leads:
                self.holdings.decided(int(step), [int(s) for s in shards], time.monotonic())
                told = {"op": "decided", "of": message.meta.get("of"), "decisions": [[step, shards]]}
                self._hold = self._changed(Message(message.kind, message.request, told))

    def _finish(self, connection: Connection, message: Message) -> Answer:
        resolved = self.holdings.finish(int(message.meta["shard"]), time.monotonic())
        self._hold = self._changed(message)
        self._resolve(resolved)
        return {}, ()

    def _adjust(self, connection: Connection, message: Message) -> Answer:
        self.holdings.adjust(message.meta["updater"], str(message.meta.get("table", "")))
        self._hold = self._changed(message)
        return {}, ()

    def _finalize(self, connection: Connection, message: Message) -> Answer:
        self._follow(message.meta.get("decisions", ()), message)
        self.holdings.finalize(int(message.meta["training"]))
        self._hold = self._changed(message)
        return {}, ()

    def _pull(self, connection: Connection, message: Message) -> Answer | None:
        self._follow(message.meta.get("decisions", ()), message)
        answer = self._try_pull(connection, message)
        if answer is None:
            self._waiting.append(self._wait(connection, message))
        return answer

    def _try_pull(self, connection: Connection, message: Message) -> Answer | None:
        """The answer to a pull; None while it must wait."""
        holdings, meta = self.holdings, message.meta
        shard, least = int(meta.get("shard", -1)), int(meta.get("version", 0))
        if holdings.initialised:
            holdings.catch_up(least)
        if not holdings.initialised or holdings.state.version < least:
            return None
        if shard >= 0 and not modes.may_pull(holdings.rules, holdings.state, shard):
            return None
        told = {"version": holdings.state.version, "decisions": self._decisions()}
        if not meta.get("dense"):
            return told, ()
        if "at" not in meta or holdings.layout is None:
            # What is sent mustn't change meanwhile.
            return told, [flat.copy() for flat in holdings.values.values()]
        written, connection.written = connection.written, None
        if written != (meta["segment"], meta["at"], holdings.state.version):
            self._copy_out(connection, message, holdings.layout)
        return told, ()

    def _copy_out(self, connection: Connection, message: Message, layout: ShardingPlan) -> None:
        """Writes the values into the worker's memory."""
        holdings = self.holdings
        for position, group in enumerate(layout.groups):
            parts = self._spans(connection, message, position, group)
            for span, part in zip(layout.spans(holdings.server, group), parts, strict=True):
                native.copy(part, holdings.values[group][span.own : span.own + span.size])

    # Tables

    def _pull_rows(self, connection: Connection, message: Message) -> Answer:
        meta = message.meta
        self._follow(meta.get("decisions", ()), message)
        rows = self.holdings.table(str(meta["table"]))
        keys = message.arrays[0]
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise InputError(f"Keys must be int64[n]. Received: {keys.dtype.name}{list(keys.shape)}")
        into = len(message.arrays) > 1
        table = rows.table
        out = message.arrays[1] if into else np.empty((len(keys), table.width), as_dtype(table.dtype))
        if out.shape != (len(keys), table.width) or out.dtype.name != table.dtype:
            raise InputError(
                f"Rows of table {table.name!r} are {table.dtype}[{len(keys)}, {table.width}]. "
                f"Received room for: {out.dtype.name}{list(out.shape)}"
            )
        rows.pull(keys, out, create=bool(meta.get("create", True)))
        return {"version": self.holdings.state.version}, () if into else (out,)

    def _push_rows(self, connection: Connection, message: Message) -> Answer:
        meta = message.meta
        push = PushEvent(int(meta["shard"]), int(meta["sequence"]), 0, int(meta.get("rows", 1)))
        keys, gradients = message.arrays
        name = str(meta["table"])
        self.holdings.push_rows(name, push, keys, gradients, time.monotonic())
        self._change(message, rows=[(keys, gradients)])
        return {"outcome": "applied"}, ()

    def _load_rows(self, connection: Connection, message: Message) -> Answer:
        names = [str(name) for name in message.meta["names"]]
        self.holdings.table(str(message.meta["table"])).load(dict(zip(names, message.arrays, strict=True)))
        self._change(message, rows=[message.arrays])
        return {}, ()

    def _read_rows(self, connection: Connection, message: Message) -> Answer:
        """Rows [start, stop) in the server's own order, with their keys; with their slots on request."""
        rows = self.holdings.table(str(message.meta["table"]))
        start, stop = int(message.meta["start"]), int(message.meta["stop"])
        wanted = ("keys", "values") if not message.meta.get("slots") else tuple(rows.arrays())
        arrays = [rows.arrays()[name][start:stop].copy() for name in wanted]
        return {"names": list(wanted), "total": len(rows), "updates": rows.updates}, arrays

    # Account

    def _last_applied(self, connection: Connection, message: Message) -> Answer:
        stream = str(message.meta.get("table", ""))
        return {"sequence": self.holdings.last_applied(int(message.meta["shard"]), stream)}, ()

    def _stats(self, connection: Connection, message: Message) -> Answer:
        return {**self.holdings.describe(), "mirrored": self.mirrored}, ()

    def _expect_checkpoints(self, connection: Connection, message: Message) -> Answer:
        self._freezer.expect()
        return {}, ()

    def _freeze(self, connection: Connection, message: Message) -> Answer:
        return {**self._freezer.freeze(connection, message), "decisions": self._decisions()}, ()

    def _checkpoint(self, connection: Connection, message: Message) -> None:
        kept = self._freezer.want(connection, message)
        self._follow(message.meta.get("decisions", ()), message)
        for entry in kept:
            self.handle(*entry)

    def _checkpointed(self, connection: Connection, message: Message, error: InsituError | None) -> None:
        if error is not None:
            self._fail(connection, message, error)
        else:
            self._post(connection, Message(REPLY, message.request, {"number": message.meta["number"]}))
