"""Pure: the steps in which a plan of moves is carried out: (state, event) -> (state, actions).

A copy is made, verified, and then flipped: from that moment the catalogue names the new owner. The old copy
is deleted when no job has the version pinned and no other copy is made from it. So readers find a live copy
at each moment, wherever the process that carries the plan out is killed. It resumes by making a plan of the
current state.

    planned -> copying -> verifying -> flipping -> draining -> deleting -> done
                   (a copy that fails is tried again, then failed)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from insitu.base.spec import NodeId
from insitu.grid.layout.rebalancing import RebalancePlan

MAX_ATTEMPTS = 3
"""How often a copy is tried."""

MoveState = Literal["planned", "copying", "verifying", "flipping", "draining", "deleting", "done", "failed"]
BEFORE_FLIP: tuple[MoveState, ...] = ("planned", "copying", "verifying", "flipping")
_COPYING: tuple[MoveState, ...] = ("copying", "verifying")


@dataclass(frozen=True, slots=True)
class MoveStep:
    """One copy that is made, or dropped, and how far that is."""

    #: The partition's number.
    partition: int
    #: The node that the bytes come from; None: a copy is only dropped.
    source: NodeId | None
    #: The node that gets the copy; None: a copy is only dropped.
    target: NodeId | None
    #: The node whose copy goes; None: the new one is one more.
    replaced: NodeId | None
    #: How far it is.
    state: MoveState = "planned"
    #: How often the copy has failed.
    failures: int = 0
    #: Why it failed; empty unless it did.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RebalanceState:
    """All moves of one version of a cache."""

    #: The moves, in the order in which they begin. A move's number is its index.
    steps: tuple[MoveStep, ...]
    #: How many copies are made at the same time, at most.
    limit: int
    #: Whether a job has the version pinned.
    pinned: bool

    @property
    def ended(self) -> bool:
        return all(step.state in ("done", "failed") for step in self.steps)


@dataclass(frozen=True, slots=True)
class Started:
    """The plan's execution begins."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The action that a move's state asks for is done."""

    #: The number of the move.
    number: int
    #: The state whose action it was.
    state: MoveState


@dataclass(frozen=True, slots=True)
class Failed:
    """The action that a move's state asks for failed."""

    #: The number of the move.
    number: int
    #: The state whose action it was.
    state: MoveState
    #: Why.
    reason: str


@dataclass(frozen=True, slots=True)
class PinsChanged:
    """Jobs began or ceased to read the version."""

    #: Whether one reads it now.
    pinned: bool


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node can't be reached any more."""

    #: The node.
    node: NodeId


Event = Started | Succeeded | Failed | PinsChanged | NodeLost


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do for one move, which ends in `Succeeded` or `Failed`, but for `discard`.

    `copy` notes the copy in the catalogue as copying and fetches it, `verify` compares its checksum, `flip`
    makes it live in one transaction and takes `replaced` out, `delete` removes the files of `replaced`,
    `discard` removes a copy that failed and its entry.
    """

    #: The steps of the plan.
    kind: Literal["copy", "verify", "flip", "delete", "discard"]
    #: The number of the move.
    number: int


_ACTION_OF: dict[MoveState, Literal["copy", "verify", "flip", "delete"]] = {
    "copying": "copy",
    "verifying": "verify",
    "flipping": "flip",
    "deleting": "delete",
}


def begin_rebalancing(plan: RebalancePlan, *, limit: int, pinned: bool) -> RebalanceState:
    """Return the state before anything is done. `limit` copies are made at the same time, at most."""
    moves = [MoveStep(m.partition, m.source, m.target, m.replaced) for m in plan.moves]
    drops = [MoveStep(partition, None, None, node) for partition, node in plan.drops]
    return RebalanceState((*moves, *drops), max(1, limit), pinned)


def advance(state: RebalanceState, event: Event) -> tuple[RebalanceState, tuple[Action, ...]]:
    """Return the state after `event`, and the next actions. Events that come late change nothing."""
    actions: list[Action] = []
    steps = list(state.steps)
    pinned = state.pinned
    match event:
        case Succeeded(number, of) if steps[number].state == of:
            steps[number] = _succeed(steps[number])
        case Failed(number, of, reason) if steps[number].state == of:
            steps[number], discarded = _fail(steps[number], reason)
            actions += [Action("discard", number)] * discarded
        case PinsChanged(now):
            pinned = now
        case NodeLost(node):
            for number, step in enumerate(steps):
                steps[number] = _without(step, node)
                lost = steps[number].state == "failed" != step.state
                if lost and step.state != "planned" and step.target not in (None, node):
                    actions.append(Action("discard", number))
    _go_on(steps, state.limit, pinned)
    for number, (before, after) in enumerate(zip(state.steps, steps, strict=True)):
        begun = before.state != after.state or before.failures != after.failures
        if begun and after.state in _ACTION_OF:
            actions.append(Action(_ACTION_OF[after.state], number))
    return RebalanceState(tuple(steps), state.limit, pinned), tuple(actions)


def _succeed(step: MoveStep) -> MoveStep:
    following: dict[MoveState, MoveState] = {
        "copying": "verifying",
        "verifying": "flipping",
        "flipping": "done" if step.replaced is None else "draining",
        "deleting": "done",
    }
    return replace(step, state=following[step.state])


def _fail(step: MoveStep, reason: str) -> tuple[MoveStep, bool]:
    """Return the move after a failure, and whether what has come of the copy is discarded."""
    failures = step.failures + 1
    ended = failures >= MAX_ATTEMPTS
    if step.state in ("flipping", "deleting"):
        # The copies are right: only this step is tried again.
        state: MoveState = "failed" if ended else step.state
        discarded = ended and step.state == "flipping" and step.target is not None
    else:
        state = "failed" if ended else "planned"
        discarded = ended or step.state == "verifying"
    return replace(step, state=state, failures=failures, reason=reason if ended else ""), discarded


def _without(step: MoveStep, node: NodeId) -> MoveStep:
    """Return the move after `node` was lost."""
    if step.state in ("draining", "deleting") and step.replaced == node:
        return replace(step, state="done")
    needs_source = step.state in ("planned", "copying") and step.source == node
    needs_target = step.state in BEFORE_FLIP and step.target == node
    if needs_source or needs_target:
        return replace(step, state="failed", reason=f"{node} was lost")
    return step


def _go_on(steps: list[MoveStep], limit: int, pinned: bool) -> None:
    """Move a state that can continue without an event into its next one."""
    for number in _find_startable(steps, limit):
        steps[number] = replace(steps[number], state="copying")
    for number, step in enumerate(steps):
        if step.state == "planned" and step.target is None:
            others = [s for s in steps if s.partition == step.partition and s.target is not None]
            if any(other.state == "failed" for other in others):
                why = f"a copy of partition {step.partition} couldn't be made"
                steps[number] = replace(step, state="failed", reason=why)
            elif all(other.state not in BEFORE_FLIP for other in others):
                steps[number] = replace(step, state="flipping")
        elif step.state == "draining" and not pinned and not _is_source(steps, step):
            steps[number] = replace(step, state="deleting")


def _is_source(steps: list[MoveStep] | tuple[MoveStep, ...], step: MoveStep) -> bool:
    """Return whether another copy is still to be made from the one that `step` replaces."""
    return any(
        other.state in BEFORE_FLIP and (other.partition, other.source) == (step.partition, step.replaced)
        for other in steps
    )


def _find_startable(steps: list[MoveStep], limit: int) -> Iterator[int]:
    room = limit - sum(step.state in _COPYING for step in steps)
    for number, step in enumerate(steps):
        if room > 0 and step.state == "planned" and step.target is not None:
            room -= 1
            yield number


def validate(state: RebalanceState) -> None:
    """Raise ValueError if the state breaks a rule that always holds."""
    if sum(step.state in _COPYING for step in state.steps) > state.limit:
        raise ValueError("more copies are made than the limit allows")
    for step in state.steps:
        if step.state in ("draining", "deleting") and step.replaced is None:
            raise ValueError("a copy is to be deleted although it replaces none")
        if step.target is None and step.state in _COPYING:
            raise ValueError("a copy without a target is made")
        if (step.state == "failed") != bool(step.reason):
            raise ValueError("a move that failed says why, and no other one does")
        if step.state == "draining" and not state.pinned and not _is_source(state.steps, step):
            raise ValueError("a copy waits although nothing has it pinned")
