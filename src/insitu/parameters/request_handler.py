"""Handles the requests to one server's state. Requests that can't be answered yet wait, and delay no other.

Nothing here owns a socket: the event loop brings messages and sends what was enqueued on connections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError, InsituError, ParameterError, ServerStalled
from insitu.parameters import native
from insitu.parameters.checkpoint_barrier import CheckpointBarrier, WatchWriter
from insitu.parameters.connection import Connection
from insitu.parameters.gradients import Gradients
from insitu.parameters.replication_log import ReplicationLog
from insitu.parameters.rules import (
    REPLY,
    REQUEST,
    MalformedMessage,
    Message,
    PushEvent,
    ShardingPlan,
    as_dtype,
    make_failure,
    modes,
    sharding_plan,
)
from insitu.parameters.server_state import PushResult, ServerState, ValueDestination
from insitu.parameters.tables import Table

# Moves dense gradients and values between messages, a worker's shared memory and a server's flat arrays


class DenseTransfer:
    """Finds the arrays that a request names, for one server.

    A request names a worker's buffers in shared memory by "segment" and "at", the start of each group in
    bytes. Without them, it carries arrays.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        #: By group, memory in which the parts of a push are joined.
        self._joined: dict[str, Array] = {}

    def read(self, connection: Connection, message: Message, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the server's own elements of each group, flat.

        `arrays` are those of the message that belong to dense variables: one for each span of each group, or
        one for each group if the message is marked "flat". Raises InputError.
        """
        plan = self._state.plan
        if plan is None:
            raise InputError(
                "Variables must be defined (Client.define) before anything else is done with them"
            )
        in_memory = "at" in message.meta
        flats, used = {}, 0
        for position, group in enumerate(plan.groups):
            if in_memory:
                parts = self._view_spans(connection, message, position, group)
            else:
                spans = plan.spans_of(self._state.server, group)
                count = 1 if message.meta.get("flat") else len(spans)
                parts = [array.reshape(-1) for array in arrays[used : used + count]]
                used += count
            flats[group] = self._join(parts, group)
        return flats

    def _join(self, parts: Sequence[Array], group: str) -> Array:
        """Return the parts as one flat array: a view if there is only one.

        The memory is used again by the next push, except in mode sync, where pushes may be held.
        """
        dtype = as_dtype(group)
        if any(part.dtype != dtype for part in parts):
            received = ", ".join(sorted({part.dtype.name for part in parts}))
            raise InputError(f"A push of {dtype.name} variables must be {dtype.name}. Received: {received}")
        if len(parts) == 1:
            return parts[0]
        size = sum(part.size for part in parts)
        joined = self._joined.get(group)
        if joined is None or joined.size != size or self._state.policy.mode == "sync":
            joined = self._joined[group] = np.empty(size, dtype)
        return np.concatenate(parts, out=joined) if parts else joined

    def find_destination(self, connection: Connection, message: Message) -> ValueDestination | None:
        """Return the memory, named by "ahead", for the values that the worker pulls next."""
        plan = self._state.plan
        if plan is None:
            return None
        parts = {}
        for position, group in enumerate(plan.groups):
            views = self._view_spans(connection, message, position, group, "ahead")
            starts = [span.server_offset for span in plan.spans_of(self._state.server, group)]
            parts[group] = list(zip(starts, views, strict=True))
        return ValueDestination(parts)

    def write_values(self, connection: Connection, message: Message, plan: ShardingPlan) -> None:
        """Copy the server's values into the worker's memory."""
        borrowed = connection.borrow(message.meta["segment"])
        borrowed.begin()
        try:
            for position, group in enumerate(plan.groups):
                views = self._view_spans(connection, message, position, group)
                values = self._state.values[group]
                for span, view in zip(plan.spans_of(self._state.server, group), views, strict=True):
                    native.copy_and_check(view, values[span.server_offset : span.server_offset + span.size])
        finally:
            borrowed.end()

    def _view_spans(
        self, connection: Connection, message: Message, position: int, group: str, field: str = "at"
    ) -> list[Array]:
        """Return views of the server's spans of a group in the worker's memory, whose start is
        `message.meta[field][position]`. They are kept on the connection, as each message needs them."""
        segment, start = int(message.meta["segment"]), int(message.meta[field][position])
        key = (self._state.server, segment, start, group)
        if key not in connection.views:
            connection.views[key] = self._make_views(connection, segment, start, group)
        views: list[Array] = connection.views[key]
        return views

    def _make_views(self, connection: Connection, number: int, start: int, group: str) -> list[Array]:
        plan, dtype = self._state.plan, as_dtype(group)
        segment = connection.segments.get(number)
        if plan is None or segment is None:
            raise InputError(
                "Variables must be defined and shared memory attached before a message names them. "
                f"Received: segment {number}"
            )
        size = plan.sizes[group]
        memory = segment.array()
        if start < 0 or start % dtype.itemsize or start + size * dtype.itemsize > memory.size:
            raise InputError(
                f"A buffer must be within {memory.size} bytes of shared memory. "
                f"Received: {size} {group} at {start}"
            )
        whole = memory[start : start + size * dtype.itemsize].view(dtype)
        return [whole[s.offset : s.offset + s.size] for s in plan.spans_of(self._state.server, group)]


Array = NDArray[Any]
Answer = tuple[dict[str, Any], Sequence[Array]]
"""Description and arrays of a reply."""

CHANGES = frozenset(
    {
        *("define", "define_table", "initialise", "push", "push_rows", "decided", "finish", "load_rows"),
        *("adjust", "finalize", "closure", "gather"),
    }
)
"""Operations that change the state: each is sent to the mirror."""
_QUERIES = frozenset(
    {
        *("pull", "pull_rows", "last_applied", "stats", "read_rows", "hello"),
        *("expect_checkpoints", "freeze", "checkpoint"),
    }
)
_LOG = logging.getLogger("insitu")
_DECISIONS_SENT = 4
"""Decisions that the leader sends with each answer; see `modes.StepDecidedEvent`."""
_WORKER_MEMORY_FIELDS = ("at", "segment", "ahead")
"""Fields of a request that name the worker's memory, which a mirror doesn't see."""


class RequestHandler:
    """Handles the requests to one server's state, in one thread."""

    def __init__(
        self,
        state: ServerState,
        stall_timeout: float,
        replication: ReplicationLog,
        watch_writer: WatchWriter,
        checkpoint_key: bytes | None = None,
    ) -> None:
        #: The state that requests read and change.
        self.state = state
        #: Sends changes to the mirror, and answers to workers.
        self.replication = replication
        self._stall_timeout = stall_timeout
        self._barrier = CheckpointBarrier(state, watch_writer, checkpoint_key)
        self._transfer = DenseTransfer(state)
        #: Pulls and gathers that wait.
        self._waiting_pulls: list[WaitingRequest] = []
        #: Pushes that wait for their step, by (shard, sequence).
        self._waiting_pushes: dict[tuple[int, int], list[WaitingRequest]] = {}
        #: Number of the change for which the answer to the present request waits; None: no wait.
        self._change: int | None = None
        self._operations: dict[str, Callable[[Connection, Message], Answer | None]] = {
            name: getattr(self, f"_{name}") for name in (*CHANGES, *_QUERIES)
        }

    # Requests

    def handle(self, connection: Connection, message: Message) -> None:
        """Answer a request, now or later. Raises MalformedMessage."""
        named = message.meta.get("op")
        operation = named if isinstance(named, str) else ""
        handle = self._operations.get(operation)
        self._change = None
        try:
            if self._barrier.block_after_cut(connection, message):
                return
            if handle is None:
                known = ", ".join(sorted(self._operations))
                raise ParameterError(
                    f"A request's operation must be one of {known}. Received: {named!r}. Install the same "
                    "version of insitu on all nodes"
                )
            answer = handle(connection, message)
        except MalformedMessage:
            raise
        except Exception as error:
            # Whatever a request raises fails the request, not the server.
            fail(connection, message, error)
        else:
            if answer is not None:
                self._answer(connection, message, *answer)
        if operation in CHANGES:
            self._retry_pulls()
        self._change = None
        self._handle_again(self._barrier.write_if_at_cut())

    def _handle_again(self, blocked: Sequence[tuple[Connection, Message]]) -> None:
        """Handle requests that were blocked by a checkpoint."""
        for connection, message in blocked:
            try:
                self.handle(connection, message)
            except MalformedMessage as error:
                fail(connection, message, error)

    def replicate(self, connection: Connection, message: Message) -> None:
        """Make a change that the primary has made, and acknowledge it; for a mirror."""
        handle = self._operations.get(str(message.meta.get("op")))
        if handle is not None:
            try:
                handle(connection, message)
            except Exception as error:
                _LOG.error("The mirror of server %d can't make a change: %s", self.state.server, error)
                raise
        self._waiting_pushes.clear()
        self._waiting_pulls.clear()
        self._change = None
        connection.enqueue(Message(REPLY, message.request, {}))

    def tick(self, now: float) -> None:
        """Fail requests that have waited too long. Call it regularly."""
        self._handle_again(self._barrier.expire(now))
        late = [w for w in self._waiting_pulls if w.deadline <= now]
        self._waiting_pulls = [w for w in self._waiting_pulls if w.deadline > now]
        for key, waiting in list(self._waiting_pushes.items()):
            late += [w for w in waiting if w.deadline <= now]
            self._waiting_pushes[key] = [w for w in waiting if w.deadline > now]
        for entry in late:
            fail(
                entry.connection,
                entry.message,
                make_stall_error(self.state, entry.message, self._stall_timeout),
            )

    def forget(self, connection: Connection) -> None:
        """Drop the waiting requests of a connection that was closed."""
        self._release_closures(connection)
        self._handle_again([b for b in self._barrier.expire(0.0, connection) if b[0] is not connection])
        self._waiting_pulls = [w for w in self._waiting_pulls if w.connection is not connection]
        for key, waiting in list(self._waiting_pushes.items()):
            left = [w for w in waiting if w.connection is not connection]
            if left:
                self._waiting_pushes[key] = left
            else:
                del self._waiting_pushes[key]

    def fail_waiting(self, error: InsituError) -> None:
        """Fail all requests that wait, because this server may not answer them any more."""
        waiting, self._waiting_pulls = self._waiting_pulls, []
        for pushes in self._waiting_pushes.values():
            waiting += pushes
        self._waiting_pushes = {}
        for entry in waiting:
            fail(entry.connection, entry.message, error)
        self.replication.fail_waiting(error)

    def _make_waiting(self, connection: Connection, message: Message) -> WaitingRequest:
        return WaitingRequest(connection, message, time.monotonic() + self._stall_timeout)

    def _answer(
        self, connection: Connection, message: Message, meta: dict[str, Any], arrays: Sequence[Array] = ()
    ) -> None:
        self.replication.reply(connection, Message(REPLY, message.request, meta, arrays), self._change)

    def _retry_pulls(self) -> None:
        """Answer the pulls that needn't wait any more."""
        waiting, self._waiting_pulls = self._waiting_pulls, []
        self._change = None
        for entry in waiting:
            try:
                answer = self._try(entry.connection, entry.message)
            except Exception as error:
                fail(entry.connection, entry.message, error)
                continue
            if answer is None:
                self._waiting_pulls.append(entry)
            else:
                self._answer(entry.connection, entry.message, *answer)

    def _answer_pushes(self, results: Sequence[PushResult]) -> None:
        """Answer the pushes that waited for these results."""
        for result in results:
            for entry in self._waiting_pushes.pop((result.push.shard, result.push.sequence), ()):
                self._answer(entry.connection, entry.message, self._describe_result(result))

    def _describe_result(self, result: PushResult) -> dict[str, Any]:
        return {
            "outcome": result.outcome,
            "version": result.version,
            "decisions": self._get_decisions(),
        }

    def _get_decisions(self) -> list[Any]:
        state = self.state
        return list(state.push_state.decisions[-_DECISIONS_SENT:]) if state.policy.mode == "sync" else []

    # Definition

    def _hello(self, connection: Connection, message: Message) -> Answer:
        state = self.state
        return {
            "server": state.server,
            "mode": state.policy.mode,
            "total_replicas": state.policy.total_replicas,
            "version": state.push_state.version,
            "defined": state.plan is not None,
        }, ()

    def _define(self, connection: Connection, message: Message) -> Answer:
        plan = sharding_plan.from_json(message.meta["layout"])
        self.state.define(plan, message.meta["updater"], message.meta["layout"])
        self._barrier.allocate_copies()
        self._change = self.replication.append(message)
        return {"initialised": self.state.initialised, "version": self.state.push_state.version}, ()

    def _define_table(self, connection: Connection, message: Message) -> Answer:
        self.state.define_table(Table.from_json(message.meta["table"]))
        self._change = self.replication.append(message)
        return {}, ()

    def _initialise(self, connection: Connection, message: Message) -> Answer:
        values = self._transfer.read(connection, message, message.arrays)
        self._replicate_arrays(message, values)
        self.state.initialise(values, again=message.meta.get("again") is True)
        connection.values_written = None
        return {}, ()

    def _replicate_arrays(
        self, message: Message, dense: Mapping[str, Array] | None = None, rows: Any = ()
    ) -> None:
        """Send a change to the mirror, with all its arrays in the message itself."""
        meta = {k: v for k, v in message.meta.items() if k not in _WORKER_MEMORY_FIELDS} | {"flat": True}
        arrays = [*(dense or {}).values(), *(array for pair in rows for array in pair)]
        self._change = self.replication.append(Message(message.kind, message.request, meta, arrays))

    # Dense variables

    def _push(self, connection: Connection, message: Message) -> Answer | None:
        meta, state = message.meta, self.state
        push = PushEvent(int(meta["shard"]), int(meta["sequence"]), int(meta["step"]), int(meta["rows"]))
        names = [str(name) for name in meta.get("tables", ())]
        record = np.array(message.arrays[-1]) if meta.get("record") else None
        split = len(message.arrays) - 2 * len(names) - (record is not None)
        dense = self._transfer.read(connection, message, message.arrays[:split]) if meta.get("dense") else {}
        pairs = [
            (message.arrays[split + 2 * i], message.arrays[split + 2 * i + 1]) for i in range(len(names))
        ]
        rows = dict(zip(names, pairs, strict=True))
        gradients = Gradients(dense, rows, finite=meta.get("finite") is True, record=record)
        destination = (
            self._transfer.find_destination(connection, message) if dense and "ahead" in meta else None
        )
        results = self._push_and_write(push, gradients, destination, connection, message)
        connection.values_written = (
            None if destination is None else (meta["segment"], meta["ahead"], destination.version)
        )
        self._replicate_arrays(message, dense, [*pairs, *(() if record is None else [(record,)])])
        own = [result for result in results if result.push.shard == push.shard]
        if own:
            self._answer_pushes([result for result in results if result.push.shard != push.shard])
            return self._describe_result(own[-1]), ()
        if not state.policy.is_leader:
            return {"outcome": "held", "version": state.push_state.version}, ()
        key = (push.shard, push.sequence)
        self._waiting_pushes.setdefault(key, []).append(self._make_waiting(connection, message))
        return None

    def _push_and_write(
        self,
        push: PushEvent,
        gradients: Gradients,
        destination: ValueDestination | None,
        connection: Connection,
        message: Message,
    ) -> Sequence[PushResult]:
        """Push, and write the new values to the worker's memory if it has lent some for that."""
        if destination is None:
            return self.state.push(push, gradients, time.monotonic())
        borrowed = connection.borrow(message.meta["segment"])
        borrowed.begin()
        try:
            return self.state.push(push, gradients, time.monotonic(), destination)
        finally:
            borrowed.end()

    def _decided(self, connection: Connection, message: Message) -> Answer:
        self._follow_decisions(message.meta["decisions"], message)
        return {"version": self.state.push_state.version}, ()

    def _follow_decisions(self, decisions: Any, message: Message) -> None:
        """Make the steps that the leader decided on and this server hasn't made."""
        for step, shards in decisions:
            if int(step) >= self.state.push_state.version and not self.state.policy.is_leader:
                self.state.follow_decision(int(step), [int(s) for s in shards], time.monotonic())
                change = {"op": "decided", "of": message.meta.get("of"), "decisions": [[step, shards]]}
                self._change = self.replication.append(Message(message.kind, message.request, change))

    def _finish(self, connection: Connection, message: Message) -> Answer:
        fit = message.meta.get("fit")
        results = self.state.finish(
            int(message.meta["shard"]), time.monotonic(), None if fit is None else int(fit)
        )
        self._change = self.replication.append(message)
        self._answer_pushes(results)
        return {}, ()

    def _adjust(self, connection: Connection, message: Message) -> Answer:
        if "learning_rates" in message.meta:
            rates = message.meta["learning_rates"]
            self.state.set_learning_rates({str(table): float(rate) for table, rate in rates.items()})
        else:
            self.state.set_updater(message.meta["updater"], str(message.meta.get("table", "")))
        self._change = self.replication.append(message)
        return {}, ()

    def _finalize(self, connection: Connection, message: Message) -> Answer:
        self._follow_decisions(message.meta.get("decisions", ()), message)
        self.state.finalize(int(message.meta["training"]))
        self._change = self.replication.append(message)
        return {}, ()

    def _pull(self, connection: Connection, message: Message) -> Answer | None:
        self._follow_decisions(message.meta.get("decisions", ()), message)
        return self._try_or_wait(connection, message)

    def _gather(self, connection: Connection, message: Message) -> Answer | None:
        self.state.gatherings.bring(message.meta, message.arrays[0])
        self._change = self.replication.append(message)
        return self._try_or_wait(connection, message)

    def _try_or_wait(self, connection: Connection, message: Message) -> Answer | None:
        answer = self._try(connection, message)
        if answer is None:
            self._waiting_pulls.append(self._make_waiting(connection, message))
        return answer

    def _try(self, connection: Connection, message: Message) -> Answer | None:
        """Return the answer to a pull or a gather; None while it must wait."""
        meta = message.meta
        if meta["op"] == "pull":
            return self._try_pull(connection, message)
        awaited = self.state.find_shards_before(int(meta["sequence"]))
        return self.state.gatherings.find(str(meta["place"]), awaited)

    def _try_pull(self, connection: Connection, message: Message) -> Answer | None:
        """Return the answer to a pull; None while it must wait."""
        state, meta = self.state, message.meta
        shard, min_version = int(meta.get("shard", -1)), int(meta.get("version", 0))
        if state.initialised:
            state.catch_up(min_version)
        if not state.initialised or state.push_state.version < min_version:
            return None
        if shard >= 0 and not modes.may_pull(state.policy, state.push_state, shard):
            return None
        reply = {"version": state.push_state.version, "decisions": self._get_decisions()}
        if state.learning_rates:
            reply["learning_rates"] = dict(state.learning_rates)
        records: list[Array] = []
        if "records" in meta:
            found, reply["missing"] = state.step_records.since(int(meta["records"]))
            records.append(found)
        if not meta.get("dense"):
            return reply, records
        if "at" not in meta or state.plan is None:
            # Copies, as the next update may come before they are sent.
            return reply, [*(flat.copy() for flat in state.values.values()), *records]
        written, connection.values_written = connection.values_written, None
        if written != (meta["segment"], meta["at"], state.push_state.version):
            self._transfer.write_values(connection, message, state.plan)
        return reply, records

    # Tables

    def _pull_rows(self, connection: Connection, message: Message) -> Answer:
        meta = message.meta
        self._follow_decisions(meta.get("decisions", ()), message)
        rows = self.state.get_table(str(meta["table"]))
        keys = message.arrays[0]
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise InputError(f"Keys must be int64[n]. Received: {keys.dtype.name}{list(keys.shape)}")
        in_memory = len(message.arrays) > 1
        table = rows.table
        out = message.arrays[1] if in_memory else np.empty((len(keys), table.width), as_dtype(table.dtype))
        if out.shape != (len(keys), table.width) or out.dtype.name != table.dtype:
            raise InputError(
                f"Rows of table {table.name!r} need memory for {table.dtype}[{len(keys)}, {table.width}]. "
                f"Received: {out.dtype.name}{list(out.shape)}"
            )
        create = bool(meta.get("create", True))
        ref = message.refs[1] if in_memory else None
        if ref is None:
            rows.pull(keys, out, create=create)
        else:
            borrowed = connection.borrow(ref.segment)
            borrowed.begin()
            try:
                rows.pull(keys, out, create=create)
            finally:
                borrowed.end()
        return {"version": self.state.push_state.version}, () if in_memory else (out,)

    def _push_rows(self, connection: Connection, message: Message) -> Answer:
        meta = message.meta
        push = PushEvent(int(meta["shard"]), int(meta["sequence"]), 0, int(meta.get("rows", 1)))
        keys, gradients = message.arrays
        self.state.push_rows(str(meta["table"]), push, keys, gradients, time.monotonic())
        self._replicate_arrays(message, rows=[(keys, gradients)])
        return {"outcome": "applied"}, ()

    def _load_rows(self, connection: Connection, message: Message) -> Answer:
        names = [str(name) for name in message.meta["names"]]
        arrays = dict(zip(names, message.arrays, strict=True))
        self.state.get_table(str(message.meta["table"])).load(arrays)
        self._replicate_arrays(message, rows=[message.arrays])
        return {}, ()

    def _read_rows(self, connection: Connection, message: Message) -> Answer:
        """Send rows [start, stop) in the server's own order, with their keys and, on request, their slots."""
        rows = self.state.get_table(str(message.meta["table"]))
        start, stop = int(message.meta["start"]), int(message.meta["stop"])
        names = ("keys", "values") if not message.meta.get("slots") else tuple(rows.arrays())
        arrays = [rows.arrays()[name][start:stop].copy() for name in names]
        return {"names": list(names), "total": len(rows), "updates": rows.updates}, arrays

    # Closures

    def _closure(self, connection: Connection, message: Message) -> Answer:
        meta, queue = message.meta, self.state.closures
        worker = int(meta["worker"])
        if not meta.get("change"):
            connection.closure_worker = worker
        self._change = self.replication.append(message)
        return queue.answer(worker, meta, message.arrays)

    def _release_closures(self, connection: Connection) -> None:
        """Have the closures of a worker whose connection was closed be run by others."""
        worker = connection.closure_worker
        if worker is not None and self.state.closures.release(worker):
            change = {"op": "closure", "do": "release", "worker": worker, "of": self.state.server}
            self.replication.append(Message(REQUEST, 0, change))

    # Progress and checkpoints

    def _last_applied(self, connection: Connection, message: Message) -> Answer:
        table = str(message.meta.get("table", ""))
        return {"sequence": self.state.last_applied(int(message.meta["shard"]), table)}, ()

    def _stats(self, connection: Connection, message: Message) -> Answer:
        return self.collect_stats(), ()

    def collect_stats(self) -> dict[str, Any]:
        """Return what `Client.stats` returns of this server."""
        return {**self.state.collect_stats(), "mirrored": self.replication.mirrored}

    def _expect_checkpoints(self, connection: Connection, message: Message) -> Answer:
        self._barrier.expect_checkpoints()
        return {}, ()

    def _freeze(self, connection: Connection, message: Message) -> Answer:
        return {**self._barrier.freeze(connection, message), "decisions": self._get_decisions()}, ()

    def _checkpoint(self, connection: Connection, message: Message) -> None:
        blocked = self._barrier.set_cut(connection, message)
        self._follow_decisions(message.meta.get("decisions", ()), message)
        self._handle_again(blocked)


# Requests that can't be answered yet, and what is said of those that have waited too long


@dataclass(slots=True)
class WaitingRequest:
    """A request that can't be answered yet."""

    #: The connection that it came by and that the answer goes to.
    connection: Connection
    #: The request.
    message: Message
    #: Time on the monotonic clock at which it fails with ServerStalled.
    deadline: float


def make_stall_error(state: ServerState, message: Message, timeout: float) -> ServerStalled:
    """Return the error of a request that has waited `timeout` seconds, with what it has waited for."""
    if "place" in message.meta:
        awaited = state.find_shards_before(int(message.meta["sequence"]))
        return ServerStalled(
            "In mode sync all workers evaluate an insitu.dataset together, each its own shards. Received in "
            f"{timeout:g} s: nothing from some of shards {awaited}. Call evaluate in each worker, give it "
            "arrays, which each evaluates alone, or raise the stall timeout (--stall-timeout)"
        )
    shard = message.meta.get("shard")
    shard = shard if isinstance(shard, int) else None
    awaited = modes.find_awaited_shards(state.policy, state.push_state, shard)
    what = f"for pushes of shards {awaited}" if state.initialised else "for the chief's first values"
    return ServerStalled(
        f"Server {state.server} waited {timeout:g} s at version {state.push_state.version} "
        f"{what}. Look why those tasks don't continue, or raise the stall timeout (--stall-timeout)"
    )


# Answers requests that failed


def fail(connection: Connection, message: Message, error: Exception) -> None:
    """Answer a request with its error."""
    connection.enqueue(make_failure(message.request, describe_bad_request(error)))


def describe_bad_request(error: Exception) -> InsituError:
    """Return the error of a request: its own, or one that says that its fields are wrong."""
    if isinstance(error, InsituError):
        return error
    return InputError(
        f"A request must have the fields of its operation. Received: {type(error).__name__}: {error}. "
        "Use only insitu's own clients"
    )
