"""Pure: when a gradient that was pushed becomes an update. One machine for the three modes.

    async     each push is an update at once
    bounded   so too, but nobody pulls while it is more than `max_staleness` pushes ahead of the slowest
    sync      a step takes `replicas_to_aggregate` pushes made at its version; later ones are dropped

Each push carries (shard, sequence): sequences of a shard count from 0, without a gap, and each is consumed
(applied or dropped) once. A repetition is recognised and answered as what became of the first.

With several servers in mode sync the first one, the *leader*, decides which pushes a step takes; the others
hold what they are given until they hear of the decision (`Decided`). A worker tells the leader of a push only
once all others hold it, so that what was decided can always be done. Only the leader keeps account of
sequences then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from insitu.errors import InputError

Mode = Literal["async", "sync", "bounded"]
MODES: tuple[Mode, ...] = get_args(Mode)
REMEMBERED = 16
"""Decisions that the leader can still tell of. Nobody can be more than one behind: see `Decided`."""

MOST_ROWS = 2**63 - 1
"""Rows of one push at most: what a mean over rows can count."""


@dataclass(frozen=True, slots=True)
class ConsistencyPolicy:
    """How a job's servers take pushes. `replicas_to_aggregate` None: all of `total_replicas`."""

    mode: Mode = "async"
    total_replicas: int = 1
    replicas_to_aggregate: int | None = None
    max_staleness: int = 4
    leads: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode must be one of {', '.join(MODES)}. Received: {self.mode!r}")
        for name in ("total_replicas", "replicas_to_aggregate", "max_staleness"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (value is None and name == "replicas_to_aggregate"):
                raise InputError(f"{name} must be a whole number. Received: {value!r}")
        if self.total_replicas < 1:
            raise InputError(f"total_replicas must be at least 1. Received: {self.total_replicas}")
        wanted = self.replicas_to_aggregate
        if wanted is not None and self.mode != "sync":
            raise InputError(
                f'replicas_to_aggregate is for mode="sync": in mode="{self.mode}" each push is an update. '
                f"Received: {wanted}"
            )
        if wanted is not None and not 1 <= wanted <= self.total_replicas:
            raise InputError(
                f"replicas_to_aggregate must be in [1, {self.total_replicas}], the total_replicas that push. "
                f"Received: {wanted}"
            )
        if self.max_staleness < 0:
            raise InputError(f"max_staleness must be at least 0 steps. Received: {self.max_staleness}")

    @property
    def needed(self) -> int:
        return self.replicas_to_aggregate or self.total_replicas


@dataclass(frozen=True, slots=True)
class PushEvent:
    """An event: a shard's gradient of `rows` rows has come. `step` is the version of what it was computed
    on."""

    shard: int
    sequence: int
    step: int
    rows: int

    def to_json(self) -> dict[str, int]:
        return {"shard": self.shard, "sequence": self.sequence, "step": self.step, "rows": self.rows}


@dataclass(frozen=True, slots=True)
class StepDecidedEvent:
    """An event on a server that doesn't lead: the step made at version `step` took these shards.

    Who is told of a step's decision pushes for the next step only after every server has heard of it: so a
    server can't be more than one decision behind.
    """

    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardFinishedEvent:
    """An event: this shard pushes no more for now; nobody waits for it until it does."""

    shard: int


Event = PushEvent | StepDecidedEvent | ShardFinishedEvent


@dataclass(frozen=True, slots=True)
class Apply:
    """An action: make one update of these, in the order of shards given. All may have no rows: then only the
    version counts."""

    pushes: tuple[PushEvent, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Hold:
    """An action: keep the gradient (in the place of one held before for the same shard)."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Drop:
    """An action: the gradient came too late for its step; its rows enter no update."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Repeat:
    """An action: this push was consumed before; answer as then."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Await:
    """An action: this push is held already; answer when it's consumed."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Refuse:
    """An action: tell the worker that this can't be."""

    push: PushEvent
    why: str


@dataclass(frozen=True, slots=True)
class CountLost:
    """An action: `count` pushes of the shard were consumed by the server that died, after the checkpoint that
    this one started from."""

    shard: int
    count: int


Action = Apply | Hold | Drop | Repeat | Await | Refuse | CountLost


@dataclass(frozen=True)
class PushState:
    """Everything the decisions rest on.

    `version`: updates made so far. `applied`: per shard the last sequence consumed. `clocks`: per shard the
    pushes consumed, in mode bounded; one that had finished comes back at the pace of the slowest. `held`:
    pushes of the step under way, in the order in which they came, `since` the first came (seconds; None:
    none). `decisions`: the last steps taken and their shards. `dropped`: per shard the last sequence
    that was dropped. `behind`: the shards that haven't pushed since this server started from a checkpoint,
    and may be ahead of it.
    """

    version: int = 0
    applied: Mapping[int, int] = field(default_factory=dict)
    clocks: Mapping[int, int] = field(default_factory=dict)
    held: tuple[PushEvent, ...] = ()
    since: float | None = None
    finished: frozenset[int] = frozenset()
    decisions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    dropped: Mapping[int, int] = field(default_factory=dict)
    behind: frozenset[int] = frozenset()

    def validate(self, rules: ConsistencyPolicy) -> None:
        """Raises AssertionError where the state can't be; for tests."""
        shards = [p.shard for p in self.held]
        if len(set(shards)) != len(shards):
            raise AssertionError(f"a shard is held twice: {shards}")
        if any(p.step != self.version for p in self.held):
            raise AssertionError(f"held at another step than {self.version}: {self.held}")
        if rules.leads and any(p.sequence != self.applied.get(p.shard, -1) + 1 for p in self.held):
            raise AssertionError("what is held isn't what comes next")
        if rules.mode != "sync" and self.held:
            raise AssertionError("only sync holds pushes")
        if (self.since is None) != (not self.held):
            raise AssertionError("`since` goes with what is held")

    def to_json(self) -> dict[str, Any]:
        """What outlives the process. What is held isn't in it: it isn't acknowledged."""
        return {
            "version": self.version,
            "applied": sorted(self.applied.items()),
            "clocks": sorted(self.clocks.items()),
            "finished": sorted(self.finished),
            "decisions": self.decisions,
            "dropped": sorted(self.dropped.items()),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PushState:
        return cls(
            version=int(data["version"]),
            applied={int(s): int(n) for s, n in data["applied"]},
            clocks={int(s): int(n) for s, n in data["clocks"]},
            finished=frozenset(int(s) for s in data["finished"]),
            decisions=tuple((int(step), tuple(int(s) for s in shards)) for step, shards in data["decisions"]),
            dropped={int(s): int(n) for s, n in data["dropped"]},
        )


def decide(
    rules: ConsistencyPolicy, state: PushState, event: Event, now: float
) -> tuple[PushState, list[Action]]:
    """What becomes of `event`. `now` in seconds of any clock that only goes forward."""
    if isinstance(event, ShardFinishedEvent):
        state = replace(state, finished=state.finished | {event.shard})
        return _take(rules, state, []) if rules.leads else (state, [])
    if isinstance(event, StepDecidedEvent):
        return _follow(state, event)
    state, lost = _catch_up(state, event)
    refusal = _refusal(rules, state, event)
    if refusal:
        return state, [Refuse(event, refusal)]
    state, actions = _take_push(rules, state, event, now)
    return state, [*lost, *actions]


def _take_push(
    rules: ConsistencyPolicy, state: PushState, event: PushEvent, now: float
) -> tuple[PushState, list[Action]]:
    if rules.mode == "sync" and not rules.leads:
        return _hold(state, event, now)
    if event.sequence <= state.applied.get(event.shard, -1):
        return state, [Repeat(event)]
    state = _come_back(rules, state, event.shard)
    if rules.mode != "sync":
        return _consume(state, (event,), event.step), [Apply((event,), event.step)]
    return _push_in_sync(rules, state, event, now)


def may_pull(rules: ConsistencyPolicy, state: PushState, shard: int) -> bool:
    """Whether `shard` may go on training now: in mode bounded, not too far ahead; in mode sync, not while
    its own push is held by the leader."""
    if rules.mode == "sync":
        return not rules.leads or all(p.shard != shard for p in state.held)
    if rules.mode == "async" or shard in state.finished:
        return True
    return state.clocks.get(shard, 0) - _slowest(rules, state) <= rules.max_staleness


def awaited(rules: ConsistencyPolicy, state: PushState, shard: int | None = None) -> list[int]:
    """The shards that the step under way, or a pull of `shard`, waits for."""
    active = [s for s in range(rules.total_replicas) if s not in state.finished]
    if rules.mode == "sync":
        held = {p.shard for p in state.held}
        return [s for s in active if s not in held]
    slowest = _slowest(rules, state)
    return [s for s in active if s != shard and state.clocks.get(s, 0) == slowest]


def _slowest(rules: ConsistencyPolicy, state: PushState) -> int:
    active = [s for s in range(rules.total_replicas) if s not in state.finished]
    return min((state.clocks.get(s, 0) for s in active), default=0)


def _refusal(rules: ConsistencyPolicy, state: PushState, push: PushEvent) -> str:
    if not 0 <= push.shard < rules.total_replicas:
        return f"shard must be in [0, {rules.total_replicas}), the total_replicas. Received: {push.shard}"
    if push.sequence < 0 or push.rows < 0:
        return f"sequence and rows must be at least 0. Received: {push.sequence}, {push.rows}"
    if push.rows > MOST_ROWS:
        return f"rows must be at most {MOST_ROWS}. Received: {push.rows}"
    keeps_account = rules.leads or rules.mode != "sync"
    following = state.applied.get(push.shard, -1) + 1 if keeps_account else push.sequence
    if push.sequence > following:
        return (
            f"pushes of a shard have no gaps: shard {push.shard} comes to sequence {following} next. "
            f"Received: {push.sequence}"
        )
    if push.sequence == following and push.step > state.version:
        return f"a gradient can't be of step {push.step}: the servers are at {state.version}"
    return ""


def restored(rules: ConsistencyPolicy, state: PushState) -> PushState:
    """The state of a server that starts from a checkpoint: each shard may be ahead of it, once."""
    return replace(state, behind=frozenset(range(rules.total_replicas)))


def _catch_up(state: PushState, push: PushEvent) -> tuple[PushState, list[Action]]:
    if push.shard not in state.behind:
        return state, []
    gap = push.sequence - state.applied.get(push.shard, -1) - 1
    state = replace(state, behind=state.behind - {push.shard}, version=max(state.version, push.step))
    if gap <= 0:
        return state, []
    clocks = {**state.clocks, push.shard: state.clocks.get(push.shard, 0) + gap}
    applied = {**state.applied, push.shard: push.sequence - 1}
    return replace(state, applied=applied, clocks=clocks), [CountLost(push.shard, gap)]


def _come_back(rules: ConsistencyPolicy, state: PushState, shard: int) -> PushState:
    if shard not in state.finished:
        return state
    slowest = _slowest(rules, state)
    clocks = {**state.clocks, shard: max(state.clocks.get(shard, 0), slowest)}
    return replace(state, finished=state.finished - {shard}, clocks=clocks)


def _consume(state: PushState, pushes: tuple[PushEvent, ...], step: int) -> PushState:
    applied, clocks = dict(state.applied), dict(state.clocks)
    for push in pushes:
        applied[push.shard] = push.sequence
        clocks[push.shard] = clocks.get(push.shard, 0) + 1
    return replace(state, version=state.version + 1, applied=applied, clocks=clocks)


def _drop(state: PushState, push: PushEvent) -> PushState:
    return replace(
        state,
        applied={**state.applied, push.shard: push.sequence},
        dropped={**state.dropped, push.shard: push.sequence},
    )


def _push_in_sync(
    rules: ConsistencyPolicy, state: PushState, push: PushEvent, now: float
) -> tuple[PushState, list[Action]]:
    """On the leader."""
    if any(p.shard == push.shard for p in state.held):
        return state, [Await(push)]
    if push.step < state.version:
        return _drop(state, push), [Drop(push)]
    state, actions = _hold(state, push, now)
    return _take(rules, state, actions)


def _hold(state: PushState, push: PushEvent, now: float) -> tuple[PushState, list[Action]]:
    """Keeps a push for the step under way; one for a step that was taken is dropped. The leader will say so
    too, and counts it."""
    if push.step < state.version:
        return state, [Drop(push)]
    others = tuple(p for p in state.held if p.shard != push.shard)
    since = now if state.since is None else state.since
    return replace(state, held=(*others, push), since=since), [Hold(push)]


def _take(
    rules: ConsistencyPolicy, state: PushState, actions: list[Action]
) -> tuple[PushState, list[Action]]:
    """Makes the step where enough pushes are held."""
    active = rules.total_replicas - len(state.finished)
    if rules.mode != "sync" or not state.held or len(state.held) < min(rules.needed, active):
        return state, actions
    return _make_step(state, tuple(sorted(p.shard for p in state.held)), actions)


def _make_step(
    state: PushState, shards: tuple[int, ...], actions: list[Action]
) -> tuple[PushState, list[Action]]:
    step, held = state.version, state.held
    pushes = tuple(sorted((p for p in held if p.shard in shards), key=lambda p: p.shard))
    state = replace(
        _consume(replace(state, held=(), since=None), pushes, step),
        decisions=(*state.decisions, (step, shards))[-REMEMBERED:],
    )
    actions.append(Apply(pushes, step))
    for push in held:
        if push.shard not in shards:
            state = _drop(state, push)
            actions.append(Drop(push))
    return state, actions


def _follow(state: PushState, event: StepDecidedEvent) -> tuple[PushState, list[Action]]:
    if event.step < state.version:
        return state, []
    missing = set(event.shards) - {p.shard for p in state.held}
    if (event.step > state.version and state.behind) or (missing and missing <= state.behind):
        # Decided before this server began from its checkpoint: what it is about can't be had again.
        lost: list[Action] = [CountLost(shard, 1) for shard in sorted(missing)]
        return replace(state, version=event.step + 1, held=(), since=None), lost
    if event.step > state.version or missing:
        raise InputError(
            f"A decision on step {event.step} came to a server at {state.version} that lacks the gradients "
            f"of shards {sorted(missing)}"
        )
    return _make_step(state, event.shards, [])


def decisions_since(state: PushState, version: int) -> list[tuple[int, tuple[int, ...]]]:
    """The decisions on the steps made at `version` and later."""
    return [(step, shards) for step, shards in state.decisions if step >= version]
