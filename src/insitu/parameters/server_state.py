"""What one server holds: its pieces of the dense variables, its rows of the tables, and the account of what
was applied. Everything a server does to numbers is here, and nothing of connections, threads or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from insitu.errors import DefinitionMismatch, InputError, NotFinite, SequenceError
from insitu.exchange import arithmetic
from insitu.exchange.pages import aligned_empty
from insitu.parameters import modes, native
from insitu.parameters.histogram import StalenessHistogram
from insitu.parameters.modes import ConsistencyPolicy, PushEvent, PushState
from insitu.parameters.sharding_plan import Piece, ShardingPlan, as_dtype, difference
from insitu.parameters.tables import RowStore, Table
from insitu.parameters.updaters import ElementwiseUpdater, FinalizingUpdater, Updater, make_updater

Array = NDArray[Any]
Outcome = Literal["applied", "dropped"]
MakeUpdater = Callable[[Mapping[str, Any] | str], Updater]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one push brings: `dense`, the server's own flat gradient of each group, or none; `rows`, by table,
    int64[n] keys and [n, width] gradients. `finite`: the worker has seen that all of `dense` is."""

    dense: Mapping[str, Array] = field(default_factory=dict)
    rows: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    finite: bool = False


@dataclass
class Ahead:
    """Where the worker that pushes will have the values next: for each group, parts of its memory and where
    in the server's own flat array they begin. Once an update has written them, `version` is that of it."""

    parts: Mapping[str, Sequence[tuple[int, Array]]]
    version: int = -1


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of a push; `version` is the server's afterwards."""

    push: PushEvent
    outcome: Outcome
    version: int


@dataclass
class PushStats:
    """Counts since the server began, of pushes unless said otherwise. `lost`: consumed by a server that died,
    after the checkpoint that this one started from. `clipped`: elements that weren't finite and became 0."""

    applied: int = 0
    rows: int = 0
    dropped: int = 0
    dropped_rows: int = 0
    repeated: int = 0
    refused: int = 0
    clipped: int = 0
    lost: int = 0
    dropped_by_shard: dict[int, int] = field(default_factory=dict)
    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        by_shard = sorted(self.dropped_by_shard.items())
        return {**plain, "dropped_by_shard": by_shard, "staleness": self.staleness.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PushStats:
        return cls(
            **{
                **data,
                "dropped_by_shard": {int(s): int(n) for s, n in data["dropped_by_shard"]},
                "staleness": StalenessHistogram.from_json(data["staleness"]),
            }
        )


def check_nan(nan: object) -> None:
    """Raises InputError for what is no policy."""
    if nan not in ("refuse", "clip"):
        raise InputError(f'nan must be "refuse" or "clip". Received: {nan!r}')


class ServerState:
    """One server's state. `server` is its index; `nan` says what becomes of a gradient that isn't finite:
    "refuse" it, or "clip" what isn't to 0."""

    def __init__(
        self,
        server: int,
        rules: ConsistencyPolicy,
        *,
        nan: str = "refuse",
        make_updater: MakeUpdater = make_updater,
    ) -> None:
        check_nan(nan)
        self.server = server
        self.rules = replace(rules, leads=server == 0)
        self.layout: ShardingPlan | None = None
        self.told: Mapping[str, Any] | None = None
        """The layout as JSON, as workers tell it."""
        self.config: Mapping[str, Any] | str = ""
        """The updater's."""
        self.values: dict[str, Array] = {}
        """Own elements by group, flat."""
        self.slots: dict[str, dict[str, Array]] = {}
        """By piece; by group where the updater is elementwise."""
        self.rows: dict[str, RowStore] = {}
        self.initialised = False
        self.checkpoints = 0
        """The number of the last checkpoint."""
        self.finalized = -1
        """The number of the last training that was finalized."""
        self.state = PushState()
        self.streams: dict[str, PushState] = {}
        """The account of pushes that are of one table alone; by table."""
        self.account = PushStats()
        self._nan = nan
        self._make_updater = make_updater
        self._updater: Updater | None = None
        self._held: dict[int, Gradients] = {}
        self._mean: dict[str, Array] = {}

    # Definition

    def define(
        self, layout: ShardingPlan, config: Mapping[str, Any] | str, told: Mapping[str, Any] | None = None
    ) -> None:
        """The dense variables, with zeros for values. Raises DefinitionMismatch where they were defined
        otherwise before, InputError for an updater that can't be made."""
        if self.layout is not None:
            other = difference(self.layout, layout)
            if not other and config != self.config:
                other = f"the optimizer is {config} instead of {self.config}"
            if other:
                raise DefinitionMismatch(
                    f"The servers hold another model than this worker has: {other}. A job's model can't "
                    "change between attempts; start a new job for it"
                )
            return
        updater = self._make_updater(config) if layout.variables else None
        values = {}
        for group in layout.groups:
            # Aligned, so that an optimizer of TensorFlow takes them as they are.
            values[group] = aligned_empty((layout.own_size(self.server, group),), as_dtype(group))
            values[group].fill(0)
        # Where there is no memory, nothing was defined.
        self.slots = self._make_slots(layout, updater, values)
        self.layout, self.config, self.told = layout, config, told
        self._updater, self.values = updater, values
        self.initialised = not layout.variables

    def _make_slots(
        self, layout: ShardingPlan, updater: Updater | None, values: Mapping[str, Array]
    ) -> dict[str, dict[str, Array]]:
        if updater is None:
            return {}
        if updater.elementwise:
            return {g: updater.slots(g, flat.shape, flat.dtype) for g, flat in values.items()}
        pieces = layout.of(self.server)
        return {p.name: updater.slots(p.name, p.shape, as_dtype(p.variable.dtype)) for p in pieces}

    def define_table(self, table: Table) -> None:
        """Raises DefinitionMismatch where it was defined otherwise before."""
        known = self.rows.get(table.name)
        if known is None:
            self.rows[table.name] = RowStore(table)
            self.streams[table.name] = PushState()
        elif known.table != table:
            raise DefinitionMismatch(
                f"The servers hold table {table.name!r} as {known.table}. Received: {table}. A job's model "
                "can't change between attempts; start a new job for it"
            )

    def adjust(self, config: Mapping[str, Any] | str, table: str = "") -> None:
        """Goes on with an updater of other settings, such as another learning rate, and the same slots; of
        the dense variables, or of one table."""
        updater = self._make_updater(config)
        if table:
            self.table(table).adjust(make_updater(config))
        elif self._updater is not None:
            self._updater = updater

    def table(self, name: str) -> RowStore:
        if name not in self.rows:
            known = ", ".join(sorted(self.rows)) or "none"
            raise InputError(f"No table is called {name!r}; defined are: {known}")
        return self.rows[name]

    def initialise(self, values: Mapping[str, Array]) -> None:
        """Sets the first values, own elements by group; later calls change nothing."""
        if not self.initialised:
            for group, flat in self.values.items():
                flat[...] = values[group]
            self.initialised = True

    # Pushes

    def push(
        self, push: PushEvent, gradients: Gradients, now: float, ahead: Ahead | None = None
    ) -> list[Resolved]:
        """Takes one push; returns what became of it and of others that waited for it, none while it waits
        itself. An update may write the values to where they are wanted `ahead`. Raises NotFinite,
        SequenceError, InputError, and then nothing has changed."""
        gradients = self._checked(push, gradients)
        state, actions = modes.decide(self.rules, self.state, push, now)
        return self._perform(state, actions, gradients, ahead)

    def decided(self, step: int, shards: Sequence[int], now: float) -> list[Resolved]:
        """On a server that doesn't lead: makes the step that the leader decided on."""
        state, actions = modes.decide(
            self.rules, self.state, modes.StepDecidedEvent(step, tuple(shards)), now
        )
        return self._perform(state, actions, Gradients())

    def held(self) -> list[tuple[PushEvent, Gradients]]:
        """The pushes that the step under way holds, in the order in which they came."""
        return [(push, self._held[push.shard]) for push in self.state.held]

    def finish(self, shard: int, now: float) -> list[Resolved]:
        """Nobody waits for `shard` until it pushes again."""
        state, actions = modes.decide(self.rules, self.state, modes.ShardFinishedEvent(shard), now)
        return self._perform(state, actions, Gradients())

    def push_rows(
        self, name: str, push: PushEvent, keys: Array, gradients: Array, now: float
    ) -> list[Resolved]:
        """A push of one table alone, which is an update at once whatever the mode; it counts its own
        sequences."""
        rows = self.table(name)
        checked = self._checked(push, Gradients(rows={name: (keys, gradients)}))
        alone = replace(self.rules, mode="async", replicas_to_aggregate=None, leads=True)
        state = self.streams[name]
        following, actions = modes.decide(
            alone, replace(state, version=max(state.version, push.step)), push, now
        )
        resolved = []
        for action in actions:
            if isinstance(action, modes.Refuse):
                self.account.refused += 1
                raise SequenceError(f"A push to table {name!r} is refused: {action.why}")
            if isinstance(action, modes.CountLost):
                self.account.lost += action.count
            elif isinstance(action, modes.Repeat):
                self.account.repeated += 1
                resolved.append(Resolved(push, "applied", following.version))
            else:
                rows.push(*checked.rows[name])
                resolved.append(Resolved(push, "applied", following.version))
        self.streams[name] = following
        return resolved

    def finalize(self, training: int) -> None:
        """Training number `training` has ended; done once, whoever says so again."""
        if training <= self.finalized:
            return
        self.finalized = training
        updater: object = self._updater
        if self.layout is not None and isinstance(updater, FinalizingUpdater):
            pieces = self.layout.of(self.server)
            updater.finalize({piece.name: self.view(self.values, piece) for piece in pieces}, self.slots)

    def catch_up(self, version: int) -> None:
        """Where these holdings come from a checkpoint, workers may be at a later version: it counts on from
        there."""
        if self.state.behind and version > self.state.version:
            self.state = replace(self.state, version=version, held=(), since=None)

    def last_applied(self, shard: int, stream: str = "") -> int:
        """The last sequence of `shard` that needs not be pushed again; -1: none. In mode sync the leader's
        answer counts."""
        if stream:
            self.table(stream)
            return self.streams[stream].applied.get(shard, -1)
        held = [p.sequence for p in self.state.held if p.shard == shard and self.rules.leads]
        return max([self.state.applied.get(shard, -1), *held])

    def _perform(
        self,
        state: PushState,
        actions: Sequence[modes.Action],
        gradients: Gradients,
        ahead: Ahead | None = None,
    ) -> list[Resolved]:
        resolved: list[Resolved] = []
        for action in actions:
            if isinstance(action, modes.Refuse):
                self.account.refused += 1
                raise SequenceError(f"A push is refused: {action.why}")
            if isinstance(action, modes.Hold):
                self._held[action.push.shard] = gradients
            elif isinstance(action, modes.Apply):
                self._apply(action, gradients, ahead)
                if ahead is not None and ahead.version >= 0:
                    ahead.version = state.version
                resolved += [Resolved(p, "applied", state.version) for p in action.pushes]
            elif isinstance(action, modes.Drop):
                self._held.pop(action.push.shard, None)
                self._count_drop(action.push)
                resolved.append(Resolved(action.push, "dropped", state.version))
            elif isinstance(action, modes.Repeat):
                self.account.repeated += 1
                dropped = state.dropped.get(action.push.shard) == action.push.sequence
                outcome: Outcome = "dropped" if dropped else "applied"
                resolved.append(Resolved(action.push, outcome, state.version))
            elif isinstance(action, modes.CountLost):
                self.account.lost += action.count
        self.state = state
        return resolved

    def _count_drop(self, push: PushEvent) -> None:
        if self.rules.mode == "sync" and not self.rules.leads:
            return
        self.account.dropped += 1
        self.account.dropped_rows += push.rows
        by_shard = self.account.dropped_by_shard
        by_shard[push.shard] = by_shard.get(push.shard, 0) + push.rows

    # Updates

    def _apply(self, action: modes.Apply, gradients: Gradients, ahead: Ahead | None) -> None:
        pushes = action.pushes
        for push in pushes:
            self.account.applied += 1
            self.account.rows += push.rows
            self.account.staleness.add(self.state.version - push.step)
        if self.rules.mode == "sync":
            held = [self._held.pop(push.shard) for push in pushes]
            self._apply_mean(pushes, held)
        elif pushes[0].rows:
            self._update(gradients.dense, ahead)
            for name, (keys, rows) in gradients.rows.items():
                self.table(name).push(keys, rows)

    def _apply_mean(self, pushes: Sequence[PushEvent], held: Sequence[Gradients]) -> None:
        """The mean by rows, added in shard order, with the exchange's own arithmetic: so the bits are those
        of the synchronous strategy."""
        weights = [float(push.rows) for push in pushes]
        dense: dict[str, Array] = {}
        for group in self.values:
            # A shard without rows may have sent nothing: it has weight 0.
            sent = [(g.dense[group], w) for g, w in zip(held, weights, strict=True) if group in g.dense]
            factors = arithmetic.coefficients([w for _, w in sent], as_dtype(group))
            if factors is not None:
                dense[group] = self._mean_of(group, [flat for flat, _ in sent], factors)
        if dense:
            self._update(dense)
        self._apply_mean_rows(held, weights)

    def _mean_of(self, group: str, rows: Sequence[Array], factors: arithmetic.Factors) -> Array:
        dtype = as_dtype(group)
        if group not in self._mean:
            self._mean[group] = aligned_empty((len(self.values[group]),), dtype)
        mean = self._mean[group]
        size = arithmetic.PAGE * 16
        reducer = arithmetic.Reducer("weighted_mean", dtype, len(rows), size)
        for low, high in arithmetic.chunks(0, len(mean), size):
            reducer.reduce([row[low:high] for row in rows], mean[low:high], factors)
        return mean

    def _apply_mean_rows(self, held: Sequence[Gradients], weights: Sequence[float]) -> None:
        for name in dict.fromkeys(name for gradients in held for name in gradients.rows):
            table = self.table(name)
            sent = [(g.rows[name], w) for g, w in zip(held, weights, strict=True) if name in g.rows]
            factors = arithmetic.coefficients(weights, as_dtype(table.table.dtype))
            if factors is None:
                continue
            by_weight = dict(zip(weights, factors, strict=True))
            keys = np.concatenate([keys for (keys, _), w in sent if w])
            table.push(keys, np.concatenate([rows * by_weight[w] for (_, rows), w in sent if w]))

    def _update(self, dense: Mapping[str, Array], ahead: Ahead | None = None) -> None:
        updater, layout = self._updater, self.layout
        if updater is None or layout is None or not dense:
            return
        if ahead is not None and isinstance(updater, ElementwiseUpdater):
            self._update_ahead(updater, dense, ahead)
            return
        if updater.elementwise:
            updater.update(self.values, dense, self.slots, self.state.version)
            return
        values, gradients = {}, {}
        for piece in layout.of(self.server):
            values[piece.name] = self.view(self.values, piece)
            gradients[piece.name] = self.view(dense, piece)
        updater.update(values, gradients, self.slots, self.state.version)

    def _update_ahead(self, updater: ElementwiseUpdater, dense: Mapping[str, Array], ahead: Ahead) -> None:
        """Updates each part and copies it at once, while it is in the cache."""
        for group, parts in ahead.parts.items():
            for start, copy in parts:
                part = slice(start, start + copy.size)
                slots = {slot: array[part] for slot, array in self.slots[group].items()}
                values, gradients = {group: self.values[group][part]}, {group: dense[group][part]}
                updater.update(values, gradients, {group: slots}, self.state.version, {group: copy})
        ahead.version = self.state.version

    @staticmethod
    def view(flat: Mapping[str, Array], piece: Piece) -> Array:
        """The part of a server's own flat arrays that is `piece`, in its shape."""
        return flat[piece.variable.dtype][piece.own : piece.own + piece.size].reshape(piece.shape)

    # Bad input

    def _checked(self, push: PushEvent, gradients: Gradients) -> Gradients:
        if not push.rows:
            return gradients
        dense, rows = dict(gradients.dense), dict(gradients.rows)
        for group, flat in dense.items():
            self._check_dense(group, flat)
            if not gradients.finite and not native.finite(flat):
                dense[group] = self._repaired(flat, self._where(push, group, flat))
        for name, (keys, values) in rows.items():
            self._check_rows(name, keys, values)
            if not native.finite(values):
                where = f"table {name!r}, shard {push.shard}, sequence {push.sequence}"
                rows[name] = (keys, self._repaired(values, where))
        return replace(gradients, dense=dense, rows=rows)

    def _check_dense(self, group: str, flat: Array) -> None:
        own = self.values.get(group)
        if own is None or flat.shape != own.shape or flat.dtype != own.dtype:
            expected = "nothing" if own is None else f"{own.dtype.name}{list(own.shape)}"
            raise InputError(
                f"A push to server {self.server} must bring {expected} for its {group} variables. "
                f"Received: {flat.dtype.name}{list(flat.shape)}"
            )

    def _check_rows(self, name: str, keys: Array, values: Array) -> None:
        table = self.table(name).table
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise InputError(
                f"Keys of table {name!r} must be int64[n]. Received: {keys.dtype.name}{list(keys.shape)}"
            )
        if values.dtype.name != table.dtype or values.shape != (len(keys), table.width):
            raise InputError(
                f"Gradients of table {name!r} must be {table.dtype}[{len(keys)}, {table.width}], a row for "
                f"each key. Received: {values.dtype.name}{list(values.shape)}"
            )

    def _where(self, push: PushEvent, group: str, flat: Array) -> str:
        layout = self.layout
        for piece in layout.of(self.server, group) if layout else ():
            if not np.isfinite(self.view({group: flat}, piece)).all():
                return f"variable {piece.name!r}, shard {push.shard}, sequence {push.sequence}"
        return f"shard {push.shard}, sequence {push.sequence}"

    def _repaired(self, values: Array, where: str) -> Array:
        finite = np.isfinite(values)
        if self._nan == "refuse":
            self.account.refused += 1
            raise NotFinite(
                f"A gradient holds {int((~finite).sum())} values that are NaN or infinite: {where}. It was "
                'not applied. Lower the learning rate, clip gradients, or set nan="clip" to take them as 0'
            )
        self.account.clipped += int((~finite).sum())
        return np.where(finite, values, values.dtype.type(0))

    # Copies

    def describe(self) -> dict[str, Any]:
        """What `stats` tells: where things are, how much, and the account."""
        layout = self.layout
        pieces = layout.of(self.server) if layout else ()
        return {
            "server": self.server,
            "mode": self.rules.mode,
            "version": self.state.version,
            "bytes": sum(flat.nbytes for flat in self.values.values()),
            "slot_bytes": sum(a.nbytes for slots in self.slots.values() for a in slots.values()),
            "pieces": [_told(piece) for piece in pieces],
            "tables": {
                name: {
                    "rows": len(rows),
                    "bytes": rows.nbytes,
                    "updates": rows.updates,
                    "evicted": rows.evicted,
                }
                for name, rows in self.rows.items()
            },
            "applied_by_shard": sorted(self.state.applied.items()),
            "held": sorted(p.shard for p in self.state.held),
            "awaited": modes.awaited(self.rules, self.state),
            **self.account.to_json(),
        }


def _told(piece: Piece) -> list[Any]:
    """The variable, its rows [start, stop), elements, bytes."""
    size = piece.size * as_dtype(piece.variable.dtype).itemsize
    return [piece.variable.name, piece.start, piece.stop, piece.size, size]
