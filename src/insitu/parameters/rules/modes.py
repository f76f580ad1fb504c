"""Pure: decides when a gradient that was pushed becomes an update. One state machine for the three modes.

    async     each push is an update at once
    bounded   the same, but a shard that is more than `max_staleness` pushes ahead of the slowest can't pull
    sync      a step takes `replicas_to_aggregate` pushes made at its version; later ones are dropped

Each push carries (shard, sequence): the sequences of a shard count from 0 without a gap, and each is consumed
(applied or dropped) once. A repeated push is recognised and gets the answer of the first.

With several servers in mode sync the first one, the *leader*, decides which pushes a step takes. The others
hold their pushes until they learn of the decision (`StepDecidedEvent`). A worker pushes to the leader only
once all others hold its push, so they can always follow the decision. Only the leader checks sequences then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from insitu.base.errors import InputError

Mode = Literal["async", "sync", "bounded"]
MODES: tuple[Mode, ...] = get_args(Mode)
DECISIONS_KEPT = 16
"""Decisions that the leader remembers. No server is more than one behind: see `StepDecidedEvent`."""

MAX_PUSH_ROWS = 2**63 - 1
"""Most rows of data in one push: what a mean over rows can count."""


@dataclass(frozen=True, slots=True)
class ConsistencyPolicy:
    """The mode in which a job's servers take pushes, and its settings. Raises InputError for bad ones."""

    #: "async", "sync" or "bounded": when a push becomes an update.
    mode: Mode = "async"
    #: Shards that push.
    total_replicas: int = 1
    #: Pushes that make a step in mode sync; None: `total_replicas`.
    replicas_to_aggregate: int | None = None
    #: Most pushes that a shard may be ahead of the slowest and still pull, in mode bounded.
    max_staleness: int = 4
    #: Whether this server decides on steps; set by `ServerState`.
    is_leader: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode must be one of {', '.join(MODES)}. Received: {self.mode!r}")
        for name in ("total_replicas", "replicas_to_aggregate", "max_staleness"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (value is None and name == "replicas_to_aggregate"):
                raise InputError(f"{name} must be a whole number. Received: {value!r}")
        if self.total_replicas < 1:
            raise InputError(f"total_replicas must be at least 1. Received: {self.total_replicas}")
        pushes = self.replicas_to_aggregate
        if pushes is not None and self.mode != "sync":
            raise InputError(
                f'replicas_to_aggregate is for mode="sync": in mode="{self.mode}" each push is an update. '
                f"Received: {pushes}"
            )
        if pushes is not None and not 1 <= pushes <= self.total_replicas:
            raise InputError(
                f"replicas_to_aggregate must be in [1, {self.total_replicas}], the total_replicas that push. "
                f"Received: {pushes}"
            )
        if self.max_staleness < 0:
            raise InputError(f"max_staleness must be at least 0 steps. Received: {self.max_staleness}")

    @property
    def pushes_per_step(self) -> int:
        """Pushes that make a step in mode sync."""
        return self.replicas_to_aggregate or self.total_replicas


@dataclass(frozen=True, slots=True)
class PushEvent:
    """Event: a gradient has arrived."""

    #: The shard that pushed.
    shard: int
    #: Number of the push among those of its shard, from 0.
    sequence: int
    #: Version of the values that the gradient was computed on.
    step: int
    #: Rows of data that it was computed from; 0: it has no gradient and only counts as a push.
    rows: int

    def to_json(self) -> dict[str, int]:
        """Return the fields by name."""
        return {"shard": self.shard, "sequence": self.sequence, "step": self.step, "rows": self.rows}


@dataclass(frozen=True, slots=True)
class StepDecidedEvent:
    """Event on a server that doesn't lead: the leader made the step at version `step` from these shards.

    A worker that learns of a step's decision pushes for the next step only after every server has learned of
    it. So a server can't be more than one decision behind.
    """

    #: Version of the values that the step was made on.
    step: int
    #: The shards whose pushes make the step.
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardFinishedEvent:
    """Event: this shard pushes no more for now. Nobody waits for it until it does.

    Once all shards have finished, all are waited for again: the next fit begins.
    """

    #: The shard that has finished.
    shard: int
    #: Number of the fit that it has ended, which counts once though it may be repeated; None: it leaves a
    #: training without fits.
    fit: int | None = None


Event = PushEvent | StepDecidedEvent | ShardFinishedEvent


@dataclass(frozen=True, slots=True)
class Apply:
    """Action: make one update of these pushes."""

    #: In the order in which they are added up. All may have no rows: then only the version changes.
    pushes: tuple[PushEvent, ...]
    #: Version of the values that the gradients were computed on.
    step: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Action: keep the gradient, in place of one held before for the same shard."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Drop:
    """Action: discard the gradient, which came too late for its step."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Repeat:
    """Action: answer again a push that was consumed before."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Await:
    """Action: answer this push, whose first copy is held, once that is consumed."""

    push: PushEvent


@dataclass(frozen=True, slots=True)
class Refuse:
    """Action: fail the push."""

    #: The push that fails.
    push: PushEvent
    #: The rule and what was received.
    why: str


@dataclass(frozen=True, slots=True)
class CountLost:
    """Action: count pushes that the server consumed after the checkpoint that it was restored from."""

    #: The shard that pushed them.
    shard: int
    #: How many.
    count: int


Action = Apply | Hold | Drop | Repeat | Await | Refuse | CountLost


@dataclass(frozen=True)
class PushState:
    """All that decisions depend on. Only `decide` makes new ones, beside `mark_restored`."""

    #: Updates made so far.
    version: int = 0
    #: Last sequence consumed, by shard.
    applied: Mapping[int, int] = field(default_factory=dict)
    #: Pushes consumed, by shard, which mode bounded compares. A shard that comes back after it finished is
    #: set to the slowest.
    clocks: Mapping[int, int] = field(default_factory=dict)
    #: Pushes of the step under way, in the order in which they came (mode sync).
    held: tuple[PushEvent, ...] = ()
    #: Time at which the first of `held` came, in seconds of the caller's clock; None: nothing is held.
    held_since: float | None = None
    #: Shards that push no more for now; never all of them.
    finished: frozenset[int] = frozenset()
    #: Fits that were ended, by shard.
    ended_fits: Mapping[int, int] = field(default_factory=dict)
    #: (version, shards) of the last steps made in mode sync.
    decisions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    #: Last sequence dropped, by shard.
    dropped: Mapping[int, int] = field(default_factory=dict)
    #: Shards that haven't pushed since this state was restored from a checkpoint, and may be ahead of it.
    maybe_ahead: frozenset[int] = frozenset()

    def validate(self, policy: ConsistencyPolicy) -> None:
        """Raise AssertionError if the state breaks an invariant; for tests."""
        shards = [p.shard for p in self.held]
        if len(set(shards)) != len(shards):
            raise AssertionError(f"a shard is held twice: {shards}")
        if any(p.step != self.version for p in self.held):
            raise AssertionError(f"held at another step than {self.version}: {self.held}")
        if policy.is_leader and any(p.sequence != self.applied.get(p.shard, -1) + 1 for p in self.held):
            raise AssertionError(f"a held push isn't the next of its shard: {self.held}")
        if policy.mode != "sync" and self.held:
            raise AssertionError("only mode sync holds pushes")
        if len(self.finished) >= policy.total_replicas:
            raise AssertionError("once all shards have finished, all are waited for again")
        if (self.held_since is None) != (not self.held):
            raise AssertionError("`held_since` must be set while pushes are held, and only then")

    def to_json(self) -> dict[str, Any]:
        """Return what outlives the process: all but held pushes, which aren't acknowledged."""
        return {
            "version": self.version,
            "applied": sorted(self.applied.items()),
            "clocks": sorted(self.clocks.items()),
            "finished": sorted(self.finished),
            "ended_fits": sorted(self.ended_fits.items()),
            "decisions": self.decisions,
            "dropped": sorted(self.dropped.items()),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PushState:
        """Return the state that `to_json` described."""
        return cls(
            version=int(data["version"]),
            applied={int(s): int(n) for s, n in data["applied"]},
            clocks={int(s): int(n) for s, n in data["clocks"]},
            finished=frozenset(int(s) for s in data["finished"]),
            ended_fits={int(s): int(n) for s, n in data.get("ended_fits", ())},
            decisions=tuple((int(step), tuple(int(s) for s in shards)) for step, shards in data["decisions"]),
            dropped={int(s): int(n) for s, n in data["dropped"]},
        )


Decision = tuple[PushState, list[Action]]


def decide(policy: ConsistencyPolicy, state: PushState, event: Event, now: float) -> Decision:
    """Return the next state and the actions that `event` leads to.

    `now`: seconds of a clock that only goes forward. Raises InputError for a decision that can't be followed.
    """
    if isinstance(event, ShardFinishedEvent):
        return _finish_shard(policy, state, event)
    if isinstance(event, StepDecidedEvent):
        return _follow_leader(state, event)
    state, lost = _catch_up(state, event)
    refusal = _explain_refusal(policy, state, event)
    if refusal:
        return state, [Refuse(event, refusal)]
    state, actions = _handle_push(policy, state, event, now)
    return state, [*lost, *actions]


def _handle_push(policy: ConsistencyPolicy, state: PushState, event: PushEvent, now: float) -> Decision:
    if policy.mode == "sync" and not policy.is_leader:
        return _hold(state, event, now)
    if event.sequence <= state.applied.get(event.shard, -1):
        return state, [Repeat(event)]
    state = _rejoin_shard(policy, state, event.shard)
    if policy.mode != "sync":
        return _consume(state, (event,)), [Apply((event,), event.step)]
    return _handle_push_as_leader(policy, state, event, now)


def may_pull(policy: ConsistencyPolicy, state: PushState, shard: int) -> bool:
    """Return whether `shard` may pull now.

    In mode bounded it waits while it is too far ahead, in mode sync while the leader holds its push.
    """
    if policy.mode == "sync":
        return not policy.is_leader or all(p.shard != shard for p in state.held)
    if policy.mode == "async" or shard in state.finished:
        return True
    return state.clocks.get(shard, 0) - _find_slowest_clock(policy, state) <= policy.max_staleness


def find_awaited_shards(policy: ConsistencyPolicy, state: PushState, shard: int | None = None) -> list[int]:
    """Return the shards that the step under way, or a pull of `shard`, waits for."""
    active = [s for s in range(policy.total_replicas) if s not in state.finished]
    if policy.mode == "sync":
        held = {p.shard for p in state.held}
        return [s for s in active if s not in held]
    slowest = _find_slowest_clock(policy, state)
    return [s for s in active if s != shard and state.clocks.get(s, 0) == slowest]


def _find_slowest_clock(policy: ConsistencyPolicy, state: PushState) -> int:
    active = [s for s in range(policy.total_replicas) if s not in state.finished]
    return min((state.clocks.get(s, 0) for s in active), default=0)


def _explain_refusal(policy: ConsistencyPolicy, state: PushState, push: PushEvent) -> str:
    """Return why a push can't be taken; "" if it can."""
    if not 0 <= push.shard < policy.total_replicas:
        return f"shard must be in [0, {policy.total_replicas}), the total_replicas. Received: {push.shard}"
    if push.sequence < 0 or push.rows < 0:
        return f"sequence and rows must be at least 0. Received: {push.sequence}, {push.rows}"
    if push.rows > MAX_PUSH_ROWS:
        return f"rows must be at most {MAX_PUSH_ROWS}. Received: {push.rows}"
    checks_sequences = policy.is_leader or policy.mode != "sync"
    following = state.applied.get(push.shard, -1) + 1 if checks_sequences else push.sequence
    if push.sequence > following:
        return (
            f"pushes of a shard have no gaps: shard {push.shard} comes to sequence {following} next. "
            f"Received: {push.sequence}"
        )
    if push.sequence == following and push.step > state.version:
        return f"a gradient can't be of step {push.step}: the servers are at {state.version}"
    return ""


def mark_restored(policy: ConsistencyPolicy, state: PushState) -> PushState:
    """Return the state of a server that is restored from a checkpoint: each shard may be ahead of it once."""
    return replace(state, maybe_ahead=frozenset(range(policy.total_replicas)))


def _catch_up(state: PushState, push: PushEvent) -> Decision:
    """Accept a gap before the first push of a shard that is ahead of a restored state; count it as lost."""
    if push.shard not in state.maybe_ahead:
        return state, []
    gap = push.sequence - state.applied.get(push.shard, -1) - 1
    state = replace(
        state, maybe_ahead=state.maybe_ahead - {push.shard}, version=max(state.version, push.step)
    )
    if gap <= 0:
        return state, []
    clocks = {**state.clocks, push.shard: state.clocks.get(push.shard, 0) + gap}
    applied = {**state.applied, push.shard: push.sequence - 1}
    return replace(state, applied=applied, clocks=clocks), [CountLost(push.shard, gap)]


def _finish_shard(policy: ConsistencyPolicy, state: PushState, event: ShardFinishedEvent) -> Decision:
    """Stop waiting for a shard, and make the step that waited for it alone."""
    shard, fit = event.shard, event.fit
    if fit is not None:
        if fit < state.ended_fits.get(shard, 0):  # repeated by another incarnation of its worker
            return state, []
        state = replace(state, ended_fits={**state.ended_fits, shard: fit + 1})
    state, actions = replace(state, finished=state.finished | {shard}), list[Action]()
    if policy.is_leader:
        state, actions = _make_step_if_complete(policy, state, actions)
    if len(state.finished) == policy.total_replicas:
        # Nobody is left who could wait, or be waited for. All begin the next fit at the same pace.
        clocks = dict.fromkeys(range(policy.total_replicas), max(state.clocks.values(), default=0))
        state = replace(state, finished=frozenset(), clocks=clocks)
    return state, actions


def _rejoin_shard(policy: ConsistencyPolicy, state: PushState, shard: int) -> PushState:
    """Wait again for a shard that had finished. It comes back at the pace of the slowest, not at its own."""
    if shard not in state.finished:
        return state
    slowest = _find_slowest_clock(policy, state)
    clocks = {**state.clocks, shard: max(state.clocks.get(shard, 0), slowest)}
    return replace(state, finished=state.finished - {shard}, clocks=clocks)


def _consume(state: PushState, pushes: tuple[PushEvent, ...]) -> PushState:
    """Count pushes as applied, in one update."""
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


def _handle_push_as_leader(
    policy: ConsistencyPolicy, state: PushState, push: PushEvent, now: float
) -> Decision:
    """Hold, drop or repeat a push, and make the step if it was the last one needed."""
    if any(p.shard == push.shard for p in state.held):
        return state, [Await(push)]
    if push.step < state.version:
        return _drop(state, push), [Drop(push)]
    state, actions = _hold(state, push, now)
    return _make_step_if_complete(policy, state, actions)


def _hold(state: PushState, push: PushEvent, now: float) -> Decision:
    """Keep a push for the step under way, or drop one for a step already made, as the leader will."""
    if push.step < state.version:
        return state, [Drop(push)]
    others = tuple(p for p in state.held if p.shard != push.shard)
    held_since = now if state.held_since is None else state.held_since
    return replace(state, held=(*others, push), held_since=held_since), [Hold(push)]


def _make_step_if_complete(policy: ConsistencyPolicy, state: PushState, actions: list[Action]) -> Decision:
    """Make the step if enough pushes are held."""
    active = policy.total_replicas - len(state.finished)
    if policy.mode != "sync" or not state.held or len(state.held) < min(policy.pushes_per_step, active):
        return state, actions
    return _make_step(state, tuple(sorted(p.shard for p in state.held)), actions)


def _make_step(state: PushState, shards: tuple[int, ...], actions: list[Action]) -> Decision:
    """Make the step from the held pushes of `shards`, and drop the others."""
    step, held = state.version, state.held
    pushes = tuple(sorted((p for p in held if p.shard in shards), key=lambda p: p.shard))
    state = replace(
        _consume(replace(state, held=(), held_since=None), pushes),
        decisions=(*state.decisions, (step, shards))[-DECISIONS_KEPT:],
    )
    actions.append(Apply(pushes, step))
    for push in held:
        if push.shard not in shards:
            state = _drop(state, push)
            actions.append(Drop(push))
    return state, actions


def _follow_leader(state: PushState, event: StepDecidedEvent) -> Decision:
    """Make the step that the leader decided on, unless it is made already."""
    if event.step < state.version:
        return state, []
    missing = set(event.shards) - {p.shard for p in state.held}
    if (event.step > state.version and state.maybe_ahead) or (missing and missing <= state.maybe_ahead):
        # Decided before this server was restored: its gradients are lost.
        lost: list[Action] = [CountLost(shard, 1) for shard in sorted(missing)]
        return replace(state, version=event.step + 1, held=(), held_since=None), lost
    if event.step > state.version or missing:
        raise InputError(
            f"A server must hold all pushes of a step before it learns of its decision; this one is at "
            f"{state.version}. Received: the decision on step {event.step}, without the pushes of shards "
            f"{sorted(missing)}. Use only insitu's own clients"
        )
    return _make_step(state, event.shards, [])
