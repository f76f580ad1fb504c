"""The state of one server: its pieces of the dense variables, its rows of the tables, and its push counts.

All arithmetic of a server is here. Connections, threads and clocks aren't: callers pass the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from insitu.base.errors import DefinitionMismatch, InputError, SequenceError
from insitu.exchange import aligned_empty
from insitu.parameters import gradients as checks
from insitu.parameters import native
from insitu.parameters.closure_queue import ClosureQueue
from insitu.parameters.gradients import GradientAverager, Gradients
from insitu.parameters.rules import (
    Array,
    ConsistencyPolicy,
    Piece,
    PushEvent,
    PushState,
    PushStats,
    ShardingPlan,
    as_dtype,
    describe_difference,
    modes,
)
from insitu.parameters.tables import RowStore, Table
from insitu.parameters.updaters import (
    ElementwiseUpdater,
    FinalizingUpdater,
    InitialisingUpdater,
    Updater,
    make_updater,
    record_staleness,
    set_learning_rate,
)

# Keeps the records of the pushes that made each update, so that every worker learns of all rows' metrics


RECORDS_KEPT = 32 << 20
"""Bytes of records that are kept for workers that come late."""


class StepRecords:
    """The records of the last updates, each float64[size], in the order in which their pushes were added."""

    def __init__(self, limit: int = RECORDS_KEPT) -> None:
        """`limit`: bytes of records that are kept."""
        self._limit = limit
        #: (version before the update, float64[pushes, size]) of each update.
        self._updates: deque[tuple[int, Array]] = deque()
        self._bytes = 0
        #: The version from which on all are kept; None before the first.
        self._start: int | None = None

    def add(self, version: int, records: Sequence[Array]) -> None:
        """Keep the records of the update at `version`."""
        if not records:
            return
        if self._start is None:
            self._start = version
        joined = np.stack(records)
        self._updates.append((version, joined))
        self._bytes += joined.nbytes
        while self._bytes > self._limit and len(self._updates) > 1:
            dropped, first = self._updates.popleft()
            self._start, self._bytes = dropped + 1, self._bytes - first.nbytes

    def since(self, version: int) -> tuple[Array, int]:
        """Return the records of all updates from `version` on, float64[pushes, size], and of how many
        updates they aren't kept any more."""
        found = []
        for at, records in reversed(self._updates):
            if at < version:
                break
            found.append(records)
        missing = 0 if self._start is None else max(0, self._start - version)
        return (np.concatenate(found[::-1]) if found else np.zeros((0, 0))), missing


Outcome = Literal["applied", "dropped"]
MakeUpdater = Callable[[Mapping[str, Any] | str], Updater]


@dataclass
class ValueDestination:
    """Memory of a worker that pulls right after its push: the update writes the new values there itself."""

    #: For each group, (start in the server's own flat array, the worker's memory for these elements).
    parts: Mapping[str, Sequence[tuple[int, Array]]]
    #: The version of the values written there, set by the update; -1: none were.
    version: int = -1


@dataclass(frozen=True, slots=True)
class PushResult:
    """The outcome of one push."""

    #: The push.
    push: PushEvent
    #: "applied" or "dropped".
    outcome: Outcome
    #: The server's version afterwards.
    version: int


class ServerState:
    """The state of one server, changed by one thread."""

    def __init__(
        self,
        server: int,
        policy: ConsistencyPolicy,
        *,
        nan: str = "refuse",
        make_updater: MakeUpdater = make_updater,
    ) -> None:
        """`nan`: "refuse" gradients that aren't finite, or "clip" such elements to 0. `make_updater` makes an
        updater of a config that workers send. Raises InputError."""
        checks.check_nan_policy(nan)
        #: The server's index.
        self.server = server
        #: The mode and its settings; the first server leads.
        self.policy = replace(policy, is_leader=server == 0)
        #: Positions of the dense variables; None before they are defined.
        self.plan: ShardingPlan | None = None
        #: `plan` as workers sent it, kept for mirrors and checkpoints.
        self.plan_json: Mapping[str, Any] | None = None
        #: Config of the dense variables' updater.
        self.updater_config: Mapping[str, Any] | str = ""
        #: The server's own elements of each group, flat. Changed in place by updates.
        self.values: dict[str, Array] = {}
        #: Learning rates that were set in place of the updaters' own, by table; "": of the dense variables.
        self.learning_rates: dict[str, float] = {}
        #: Slots of the updater by piece, or by group if the updater is elementwise.
        self.slots: dict[str, dict[str, Array]] = {}
        #: Rows of each table.
        self.tables: dict[str, RowStore] = {}
        #: Whether the chief's first values are there.
        self.initialised = False
        #: Number of the last checkpoint, written by `CheckpointBarrier`; 0: none.
        self.last_checkpoint = 0
        #: Number of the last training that was finalized; -1: none.
        self.last_finalized = -1
        #: Progress of the pushes of dense variables.
        self.push_state = PushState()
        #: Progress of the pushes to one table alone, by table.
        self.table_push_states: dict[str, PushState] = {}
        #: Closures that workers run; the first server has them.
        self.closures = ClosureQueue()
        #: Counts of what became of pushes.
        self.stats = PushStats()
        #: Workers' records of the rows of the last updates (mode sync, on the leader).
        self.step_records = StepRecords()
        #: Arrays of shards to be gathered; the first server has them.
        self.gatherings = Gatherings()
        self._nan = nan
        self._make_updater = make_updater
        self._updater: Updater | None = None
        #: Gradients that the step under way holds, by shard.
        self._held_gradients: dict[int, Gradients] = {}
        self._averager = GradientAverager()

    # Definition

    def define(
        self,
        plan: ShardingPlan,
        config: Mapping[str, Any] | str,
        plan_json: Mapping[str, Any] | None = None,
    ) -> None:
        """Define the dense variables, with zeros for values.

        Raises DefinitionMismatch if they were defined otherwise before, InputError for an updater that
        can't be made.
        """
        if self.plan is not None:
            other = describe_difference(self.plan, plan)
            if not other and config != self.updater_config:
                other = f"the optimizer is {config} instead of {self.updater_config}"
            if other:
                raise DefinitionMismatch(
                    f"The servers hold another model than this worker has: {other}. A job's model can't "
                    "change between attempts; start a new job for it"
                )
            return
        updater = self._make_updater(config) if plan.variables else None
        values = {}
        for group in plan.groups:
            # Aligned, so that a TensorFlow optimizer uses them without a copy.
            values[group] = aligned_empty((plan.server_size(self.server, group),), as_dtype(group))
            values[group].fill(0)
        # Nothing is assigned before all memory is there, so a MemoryError leaves nothing defined.
        self.slots = self._make_slots(plan, updater, values)
        self.plan, self.updater_config, self.plan_json = plan, config, plan_json
        self._updater, self.values = updater, values
        self.initialised = not plan.variables

    def _make_slots(
        self, plan: ShardingPlan, updater: Updater | None, values: Mapping[str, Array]
    ) -> dict[str, dict[str, Array]]:
        if updater is None:
            return {}
        if updater.elementwise:
            return {g: updater.slots(g, flat.shape, flat.dtype) for g, flat in values.items()}
        pieces = plan.pieces_of(self.server)
        return {p.name: updater.slots(p.name, p.shape, as_dtype(p.variable.dtype)) for p in pieces}

    def define_table(self, table: Table) -> None:
        """Define a table. Raises DefinitionMismatch if it was defined otherwise before."""
        known = self.tables.get(table.name)
        if known is None:
            self.tables[table.name] = RowStore(table)
            self.table_push_states[table.name] = PushState()
        elif known.table != table:
            raise DefinitionMismatch(
                f"The servers hold table {table.name!r} as {known.table}. Received: {table}. A job's model "
                "can't change between attempts; start a new job for it"
            )

    def set_updater(self, config: Mapping[str, Any] | str, table: str = "") -> None:
        """Replace the updater of the dense variables, or of one table, by one of other settings, such as
        another learning rate. The slots stay."""
        updater = self._make_updater(config)
        self.learning_rates.pop(table, None)
        if table:
            self.get_table(table).set_updater(make_updater(config))
        elif self._updater is not None:
            self._updater = updater

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Continue with other learning rates, by table; "": of the dense variables. The slots stay."""
        for table, rate in rates.items():
            if not 0.0 <= rate < math.inf:
                raise InputError(f"A learning rate must be a finite number >= 0. Received: {rate}")
            if table:
                self.get_table(table).set_learning_rate(rate)
            elif self._updater is not None:
                set_learning_rate(self._updater, rate)
            self.learning_rates[table] = rate

    def get_table(self, name: str) -> RowStore:
        """Return a table's rows. Raises InputError if it isn't defined."""
        if name not in self.tables:
            known = ", ".join(sorted(self.tables)) or "none"
            raise InputError(
                f"A table must be defined before it is used; defined are: {known}. Received: {name!r}"
            )
        return self.tables[name]

    def initialise(self, values: Mapping[str, Array], *, again: bool = False) -> None:
        """Set the first values, own elements by group. Later calls change nothing unless `again`."""
        if again or not self.initialised:
            for group, flat in self.values.items():
                flat[...] = values[group]
            updater: object = self._updater
            if not self.initialised and isinstance(updater, InitialisingUpdater):
                updater.initialise(self._view_pieces(), self.slots)
            self.initialised = True

    # Pushes

    def push(
        self,
        push: PushEvent,
        gradients: Gradients,
        now: float,
        destination: ValueDestination | None = None,
    ) -> list[PushResult]:
        """Take one push.

        Return its result and those of other pushes that waited for it; none while it waits itself. An update
        may write the values to `destination` too. Raises NotFinite, SequenceError, InputError, and then
        nothing has changed.
        """
        gradients = self._check_gradients(push, gradients)
        state, actions = modes.decide(self.policy, self.push_state, push, now)
        return self._execute(state, actions, gradients, destination)

    def follow_decision(self, step: int, shards: Sequence[int], now: float) -> list[PushResult]:
        """Make the step that the leader decided on; for a server that doesn't lead."""
        event = modes.StepDecidedEvent(step, tuple(shards))
        state, actions = modes.decide(self.policy, self.push_state, event, now)
        return self._execute(state, actions, Gradients())

    def held_pushes(self) -> list[tuple[PushEvent, Gradients]]:
        """Return the pushes that the step under way holds, in the order in which they came."""
        return [(push, self._held_gradients[push.shard]) for push in self.push_state.held]

    def finish(self, shard: int, now: float, fit: int | None = None) -> list[PushResult]:
        """Stop waiting for `shard`; see `ShardFinishedEvent`. Return the results of pushes that waited for
        it."""
        event = modes.ShardFinishedEvent(shard, fit)
        state, actions = modes.decide(self.policy, self.push_state, event, now)
        return self._execute(state, actions, Gradients())

    def push_rows(self, name: str, push: PushEvent, keys: Array, gradients: Array, now: float) -> None:
        """Update one table alone, at once whatever the mode. Such pushes have sequences of their own.

        Raises NotFinite, SequenceError, InputError, and then nothing has changed.
        """
        rows = self.get_table(name)
        checked = self._check_gradients(push, Gradients(rows={name: (keys, gradients)}))
        policy = replace(self.policy, mode="async", replicas_to_aggregate=None, is_leader=True)
        state = self.table_push_states[name]
        # The step of such a push is no version of the table, so no version is too low for it.
        state = replace(state, version=max(state.version, push.step))
        following, actions = modes.decide(policy, state, push, now)
        for action in actions:
            if isinstance(action, modes.Refuse):
                self.stats.refused += 1
                raise SequenceError(f"A push to table {name!r} is refused: {action.why}")
            if isinstance(action, modes.CountLost):
                self.stats.lost += action.count
            elif isinstance(action, modes.Repeat):
                self.stats.repeated += 1
            else:
                rows.push(*checked.rows[name])
        self.table_push_states[name] = following

    def finalize(self, training: int) -> None:
        """Have the updater put its final values into the variables when a training ends, once for each
        number."""
        if training <= self.last_finalized:
            return
        self.last_finalized = training
        updater: object = self._updater
        if isinstance(updater, FinalizingUpdater):
            updater.finalize(self._view_pieces(), self.slots)

    def catch_up(self, version: int) -> None:
        """Continue counting from `version`, that of the workers, if this state was restored from an earlier
        checkpoint."""
        if self.push_state.maybe_ahead and version > self.push_state.version:
            self.push_state = replace(self.push_state, version=version, held=(), held_since=None)

    def last_applied(self, shard: int, table: str = "") -> int:
        """Return the last sequence of `shard` that needs not be pushed again; -1: none.

        `table`: of its pushes to that table alone. In mode sync the leader's answer counts.
        """
        if table:
            self.get_table(table)
            return self.table_push_states[table].applied.get(shard, -1)
        held = [p.sequence for p in self.push_state.held if p.shard == shard and self.policy.is_leader]
        return max([self.push_state.applied.get(shard, -1), *held])

    def find_shards_before(self, sequence: int) -> list[int]:
        """Return the shards whose next push may yet be number `sequence`: those that haven't pushed it, nor
        ended their fit."""
        shards = range(self.policy.total_replicas)
        finished = self.push_state.finished
        return [s for s in shards if s not in finished and self.last_applied(s) < sequence]

    def _execute(
        self,
        state: PushState,
        actions: Sequence[modes.Action],
        gradients: Gradients,
        destination: ValueDestination | None = None,
    ) -> list[PushResult]:
        """Carry out what `modes.decide` decided, then adopt its state."""
        results: list[PushResult] = []
        for action in actions:
            if isinstance(action, modes.Refuse):
                self.stats.refused += 1
                raise SequenceError(f"A push is refused: {action.why}")
            if isinstance(action, modes.Hold):
                self._held_gradients[action.push.shard] = gradients
            elif isinstance(action, modes.Apply):
                self._apply(action, gradients, destination)
                if destination is not None and destination.version >= 0:
                    destination.version = state.version
                results += [PushResult(p, "applied", state.version) for p in action.pushes]
            elif isinstance(action, modes.Drop):
                self._held_gradients.pop(action.push.shard, None)
                self._count_drop(action.push)
                results.append(PushResult(action.push, "dropped", state.version))
            elif isinstance(action, modes.Repeat):
                self.stats.repeated += 1
                dropped = state.dropped.get(action.push.shard) == action.push.sequence
                outcome: Outcome = "dropped" if dropped else "applied"
                results.append(PushResult(action.push, outcome, state.version))
            elif isinstance(action, modes.CountLost):
                self.stats.lost += action.count
        self.push_state = state
        return results

    def _count_drop(self, push: PushEvent) -> None:
        if self.policy.mode == "sync" and not self.policy.is_leader:
            return  # the leader counts it
        self.stats.dropped += 1
        self.stats.dropped_rows += push.rows
        by_shard = self.stats.dropped_by_shard
        by_shard[push.shard] = by_shard.get(push.shard, 0) + push.rows

    # Updates

    def _apply(self, action: modes.Apply, gradients: Gradients, destination: ValueDestination | None) -> None:
        pushes = action.pushes
        for push in pushes:
            self.stats.applied += 1
            self.stats.rows += push.rows
            self.stats.staleness.add(self.push_state.version - push.step)
        if self.policy.mode == "sync":
            held = [self._held_gradients.pop(push.shard) for push in pushes]
            weights = [float(push.rows) for push in pushes]
            self.step_records.add(action.step, [one.record for one in held if one.record is not None])
            self._update(self._averager.average_dense(held, weights, self.values))
            for name, keys, rows in self._averager.average_rows(held, weights):
                self.get_table(name).push(keys, rows)
        elif pushes[0].rows:
            record_staleness(self._updater, max(0, self.push_state.version - pushes[0].step))
            self._update(gradients.dense, destination)
            for name, (keys, rows) in gradients.rows.items():
                self.get_table(name).push(keys, rows)

    def _update(self, dense: Mapping[str, Array], destination: ValueDestination | None = None) -> None:
        updater, plan = self._updater, self.plan
        if updater is None or plan is None or not dense:
            return
        if destination is not None and isinstance(updater, ElementwiseUpdater):
            self._update_and_write(updater, dense, destination)
            return
        if updater.elementwise:
            updater.update(self.values, dense, self.slots, self.push_state.version)
            return
        values, gradients = {}, {}
        for piece in plan.pieces_of(self.server):
            values[piece.name] = self.view_piece(self.values, piece)
            gradients[piece.name] = self.view_piece(dense, piece)
        updater.update(values, gradients, self.slots, self.push_state.version)

    def _update_and_write(
        self, updater: ElementwiseUpdater, dense: Mapping[str, Array], destination: ValueDestination
    ) -> None:
        """Update part by part, and copy each part to the worker while it is in the cache."""
        for group, parts in destination.parts.items():
            for start, target in parts:
                part = slice(start, start + target.size)
                slots = {slot: array[part] for slot, array in self.slots[group].items()}
                values, gradients = {group: self.values[group][part]}, {group: dense[group][part]}
                updater.update(values, gradients, {group: slots}, self.push_state.version, {group: target})
        destination.version = self.push_state.version

    def _view_pieces(self) -> dict[str, Array]:
        pieces = self.plan.pieces_of(self.server) if self.plan is not None else ()
        return {piece.name: self.view_piece(self.values, piece) for piece in pieces}

    @staticmethod
    def view_piece(flat: Mapping[str, Array], piece: Piece) -> Array:
        """Return the part of a server's flat arrays that is `piece`, in its shape."""
        start = piece.server_offset
        return flat[piece.variable.dtype][start : start + piece.size].reshape(piece.shape)

    # Checks

    def _check_gradients(self, push: PushEvent, gradients: Gradients) -> Gradients:
        if not push.rows:
            return gradients
        dense, rows = dict(gradients.dense), dict(gradients.rows)
        for group, flat in dense.items():
            checks.check_dense(group, flat, self.values.get(group), self.server)
            if not gradients.finite and not native.all_finite(flat):
                dense[group] = self._refuse_or_clip(flat, push, self._name_nonfinite(group, flat))
        for name, (keys, values) in rows.items():
            checks.check_rows(self.get_table(name).table, keys, values)
            if not native.all_finite(values):
                rows[name] = (keys, self._refuse_or_clip(values, push, f"table {name!r}, "))
        return replace(gradients, dense=dense, rows=rows)

    def _name_nonfinite(self, group: str, flat: Array) -> str:
        for piece in self.plan.pieces_of(self.server, group) if self.plan else ():
            if not np.isfinite(self.view_piece({group: flat}, piece)).all():
                return f"variable {piece.name!r}, "
        return ""

    def _refuse_or_clip(self, values: Array, push: PushEvent, name: str) -> Array:
        if self._nan == "refuse":
            self.stats.refused += 1
            raise checks.refuse_nonfinite(values, f"{name}shard {push.shard}, sequence {push.sequence}")
        clipped, count = checks.clip_nonfinite(values)
        self.stats.clipped += count
        return clipped

    # Statistics

    def collect_stats(self) -> dict[str, Any]:
        """Return what `Client.stats` returns of this server: positions, sizes, progress and push counts."""
        plan = self.plan
        pieces = plan.pieces_of(self.server) if plan else ()
        return {
            "server": self.server,
            "mode": self.policy.mode,
            "version": self.push_state.version,
            "bytes": sum(flat.nbytes for flat in self.values.values()),
            "slot_bytes": sum(a.nbytes for slots in self.slots.values() for a in slots.values()),
            "pieces": [_describe_piece(piece) for piece in pieces],
            "tables": {
                name: {
                    "rows": len(rows),
                    "bytes": rows.nbytes,
                    "updates": rows.updates,
                    "evicted": rows.evicted,
                }
                for name, rows in self.tables.items()
            },
            "applied_by_shard": sorted(self.push_state.applied.items()),
            "held": sorted(p.shard for p in self.push_state.held),
            "awaited": modes.find_awaited_shards(self.policy, self.push_state),
            **self.stats.to_json(),
        }


def _describe_piece(piece: Piece) -> list[Any]:
    """Return [variable, first row, row after the last, elements, bytes]."""
    size = piece.size * as_dtype(piece.variable.dtype).itemsize
    return [piece.variable.name, piece.start, piece.stop, piece.size, size]


# Keeps what all shards bring to a place, so that each gets everybody's: a gather over the first server


GATHERINGS_BYTES = 32 << 20
"""Bytes that are kept for workers that come to a place again, after a restart."""


class Gatherings:
    """The arrays of the shards, each float64[rows, size], by place. A place is any text."""

    def __init__(self, limit: int = GATHERINGS_BYTES) -> None:
        """`limit`: bytes that are kept; the places that were opened first are forgotten first."""
        self._limit = limit
        self._brought: dict[str, dict[int, Array]] = {}
        self._bytes = 0

    def bring(self, meta: Mapping[str, Any], array: Array) -> None:
        """Keep what a worker brings for its "shards" to a "place": so many "rows" of `array` for each. A
        shard's earlier rows stay, as others may have them."""
        place, stop = str(meta["place"]), 0
        brought = self._brought.setdefault(place, {})
        for shard, rows in zip(meta["shards"], meta["rows"], strict=True):
            start, stop = stop, stop + int(rows)
            if int(shard) not in brought:
                brought[int(shard)] = np.array(array[start:stop])
                self._bytes += brought[int(shard)].nbytes
        while self._bytes > self._limit and len(self._brought) > 1:
            forgotten = self._brought.pop(next(iter(self._brought)))
            self._bytes -= sum(one.nbytes for one in forgotten.values())

    def find(self, place: str, awaited: Collection[int]) -> tuple[dict[str, Any], list[Array]] | None:
        """Return a description with the "shards" that came, and their arrays as one, in the order of shards;
        None while one of `awaited` is missing."""
        brought = self._brought.get(place, {})
        if not brought or any(shard not in brought for shard in awaited):
            return None
        shards = sorted(brought)
        return {"shards": shards}, [np.concatenate([brought[shard] for shard in shards])]
