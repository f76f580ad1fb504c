"""Moves are carried out such that a live copy of each partition is there at each moment."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.spec import NodeId, PlacedCopy
from insitu.grid.layout import flip_copies, plan_rebalancing
from insitu.grid.layout.move_states import (
    MAX_ATTEMPTS,
    Action,
    Event,
    Failed,
    MoveStep,
    NodeLost,
    PinsChanged,
    RebalanceState,
    Started,
    Succeeded,
    advance,
    begin_rebalancing,
    validate,
)

A, B, C, D = (NodeId(name) for name in "abcd")


def one(pinned: bool = False, **changes: object) -> RebalanceState:
    """The move of partition 0 from a to b."""
    return RebalanceState((MoveStep(0, A, B, A, **changes),), 1, pinned)  # type: ignore[arg-type]


def run(state: RebalanceState, *events: Event) -> tuple[RebalanceState, list[str]]:
    kinds = []
    for event in events:
        state, actions = advance(state, event)
        validate(state)
        kinds += [action.kind for action in actions]
    return state, kinds


COPIED = (Started(), Succeeded(0, "copying"))
FLIPPED = (*COPIED, Succeeded(0, "verifying"), Succeeded(0, "flipping"))


def test_a_copy_is_made_verified_flipped_and_then_the_old_one_deleted():
    state, kinds = run(one(), *FLIPPED, Succeeded(0, "deleting"))
    assert kinds == ["copy", "verify", "flip", "delete"] and state.ended
    assert state.steps[0].state == "done"


def test_nothing_is_deleted_while_a_job_reads_it():
    state, kinds = run(one(pinned=True), *FLIPPED)
    assert kinds == ["copy", "verify", "flip"] and state.steps[0].state == "draining"
    _, kinds = run(state, PinsChanged(True), PinsChanged(False))
    assert kinds == ["delete"]


def test_a_copy_is_tried_again_and_then_given_up_with_its_reason():
    state, kinds = run(one(), Started(), *[Failed(0, "copying", "cut")] * MAX_ATTEMPTS)
    assert kinds == ["copy"] * MAX_ATTEMPTS + ["discard"]
    assert state.steps[0].state == "failed" and state.steps[0].reason == "cut"


def test_wrong_bytes_are_discarded_and_the_copy_begins_again():
    state, kinds = run(one(), *COPIED, Failed(0, "verifying", "checksum"))
    assert kinds == ["copy", "verify", "discard", "copy"] and state.steps[0].state == "copying"


@pytest.mark.parametrize("step", ["flipping", "deleting"])
def test_what_is_copied_is_not_copied_again(step: str):
    events = (*COPIED, Succeeded(0, "verifying")) if step == "flipping" else FLIPPED
    state, kinds = run(one(), *events, Failed(0, step, "busy"))  # type: ignore[arg-type]
    assert kinds[-1] == kinds[-2] and kinds.count("copy") == 1 and state.steps[0].state == step


@pytest.mark.parametrize(
    ("node", "events", "state"),
    [
        (B, COPIED, "failed"),
        (A, (Started(),), "failed"),
        (A, COPIED, "verifying"),
        (A, FLIPPED, "done"),
        (B, FLIPPED, "deleting"),
        (C, COPIED, "verifying"),
    ],
)
def test_a_lost_node_ends_the_moves_that_need_it(node: NodeId, events: tuple[Event, ...], state: str):
    ended, _ = run(one(), *events, NodeLost(node))
    assert ended.steps[0].state == state


def test_late_events_change_nothing():
    state, _ = run(one(), *FLIPPED)
    for event in (Succeeded(0, "copying"), Failed(0, "verifying", "x"), Started()):
        assert advance(state, event) == (state, ())


def test_only_so_many_copies_are_made_at_once():
    steps = tuple(MoveStep(i, A, B, A) for i in range(5))
    state, actions = advance(RebalanceState(steps, 2, False), Started())
    assert actions == (Action("copy", 0), Action("copy", 1))
    state, _ = run(state, Succeeded(1, "copying"))
    _, actions = advance(state, Succeeded(1, "verifying"))
    assert set(actions) == {Action("flip", 1), Action("copy", 2)}


def test_a_copy_stays_while_another_one_is_made_from_it():
    steps = (MoveStep(0, A, B, A), MoveStep(0, A, C, None))
    state, kinds = run(RebalanceState(steps, 1, False), *FLIPPED)
    assert kinds == ["copy", "verify", "flip", "copy"] and state.steps[0].state == "draining"
    failed, kinds = run(state, *[Failed(1, "copying", "cut")] * MAX_ATTEMPTS)
    assert kinds[-1] == "delete" and failed.steps[1].state == "failed"
    _, kinds = run(state, *[Succeeded(1, s) for s in ("copying", "verifying", "flipping")])
    assert kinds == ["verify", "flip", "delete"]


def test_a_copy_is_dropped_only_after_all_copies_of_its_partition_are_made():
    steps = (MoveStep(0, A, C, A), MoveStep(0, None, None, B))
    state, kinds = run(RebalanceState(steps, 2, False), Started())
    assert kinds == ["copy"]
    failed, _ = run(state, NodeLost(C))
    assert [step.state for step in failed.steps] == ["failed", "failed"]
    state, kinds = run(state, Succeeded(0, "copying"), Succeeded(0, "verifying"), Succeeded(0, "flipping"))
    assert kinds == ["verify", "flip", "delete", "flip"] and state.steps[1].state == "flipping"


class World:
    """A catalogue and stores, on which actions have their effects."""

    def __init__(self, copies: list[PlacedCopy]) -> None:
        self.copies = copies
        self.files = {(copy.partition, copy.node) for copy in copies}

    def perform(self, action: Action, step: MoveStep) -> None:
        if action.kind == "copy" and step.target is not None:
            arriving = PlacedCopy(step.partition, step.target, "copying")
            if arriving not in self.copies:
                self.copies.append(arriving)
            assert (step.partition, step.source) in self.files
        elif action.kind == "flip" and step.target is not None:
            self.files.add((step.partition, step.target))
            self.copies = flip_copies(self.copies, [(step.partition, step.replaced, step.target)])
        elif action.kind == "flip":
            self.copies.remove(PlacedCopy(step.partition, step.replaced))  # type: ignore[arg-type]
        elif action.kind == "delete":
            self.files.remove((step.partition, step.replaced))  # type: ignore[arg-type]
        elif action.kind == "discard" and step.target is not None:
            self.copies.remove(PlacedCopy(step.partition, step.target, "copying"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_each_partition_has_a_live_copy_at_each_moment(seed: int):
    """Whatever fails, and in whichever order things end."""
    draw = random.Random(seed)
    nodes = (A, B, C, D)
    copies = [PlacedCopy(p, node) for p in range(4) for node in draw.sample(nodes, draw.randint(1, 3))]
    leaving = draw.sample(nodes, draw.randint(0, 2))
    plan = plan_rebalancing(copies, dict.fromkeys(range(4), 1), nodes, draw.randint(0, 1), leaving)
    world = World(list(copies))
    state = begin_rebalancing(plan, limit=draw.randint(1, 3), pinned=draw.random() < 0.5)
    pending: list[Action] = []
    event: Event = Started()
    for turn in range(500):
        before = state
        state, actions = advance(state, event)
        validate(state)
        for action in actions:
            if action.kind == "discard":
                world.perform(action, before.steps[action.number])
                continue
            pending.append(action)
            if action.kind == "delete" and before.steps[action.number].state != "deleting":
                assert not state.pinned
        live = [copy for copy in world.copies if copy.state == "live"]
        assert {copy.partition for copy in live} == set(range(4))
        assert all((copy.partition, copy.node) in world.files for copy in live)
        if state.ended:
            break
        if not pending or draw.random() < 0.1:
            event = PinsChanged(turn < 100 and bool(pending) and draw.random() < 0.5)
            continue
        action = pending.pop(draw.randrange(len(pending)))
        step = state.steps[action.number]
        failed = draw.random() < 0.2
        if not failed or action.kind == "copy":
            world.perform(action, step)
        event = Failed(action.number, step.state, "x") if failed else Succeeded(action.number, step.state)
    assert state.ended and not pending
    if all(step.state == "done" for step in state.steps):
        owners = {p: {c.node for c in world.copies if c.partition == p} for p in range(4)}
        assert owners == {p: set(found) for p, found in plan.owners.items()}
        assert world.files == {(p, node) for p, found in owners.items() for node in found}
