"""When a push becomes an update: the machine of the three modes, driven by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.errors import InputError
from insitu.parameters.rules import modes
from insitu.parameters.rules.modes import (
    Apply,
    Await,
    ConsistencyPolicy,
    Drop,
    Hold,
    PushEvent,
    PushState,
    Refuse,
    Repeat,
    ShardFinishedEvent,
    StepDecidedEvent,
)


def run(policy: ConsistencyPolicy, state: PushState, *events: Any) -> tuple[PushState, list[Any]]:
    actions: list[Any] = []
    for event in events:
        state, done = modes.decide(policy, state, event, 1.0)
        state.validate(policy)
        actions += done
    return state, actions


def test_async_applies_each_push_at_once():
    policy = ConsistencyPolicy("async", 2)
    state, actions = run(
        policy, PushState(), PushEvent(0, 0, 0, 8), PushEvent(0, 1, 1, 8), PushEvent(1, 0, 0, 8)
    )
    assert [type(a) for a in actions] == [Apply] * 3
    assert all(modes.may_pull(policy, state, shard) for shard in (0, 1, 2))
    assert state.version == 3
    assert dict(state.applied) == {0: 1, 1: 0}


def test_a_repeated_push_is_recognised_and_a_gap_refused():
    policy = ConsistencyPolicy("async", 1)
    state, actions = run(
        policy, PushState(), PushEvent(0, 0, 0, 8), PushEvent(0, 0, 0, 8), PushEvent(0, 2, 1, 8)
    )
    assert [type(a) for a in actions] == [Apply, Repeat, Refuse]
    assert "comes to sequence 1 next. Received: 2" in actions[2].why
    assert state.version == 1


def test_a_gradient_of_a_later_step_is_refused():
    _, actions = run(ConsistencyPolicy("sync", 1), PushState(), PushEvent(0, 0, 3, 8))
    assert "can't be of step 3" in actions[0].why


def test_a_step_takes_all_pushes_in_the_order_of_shards():
    policy = ConsistencyPolicy("sync", 3)
    state, actions = run(policy, PushState(), PushEvent(2, 0, 0, 8), PushEvent(0, 0, 0, 7))
    assert [type(a) for a in actions] == [Hold, Hold]
    assert modes.find_awaited_shards(policy, state) == [1]
    assert not modes.may_pull(policy, state, 0)
    state, actions = run(policy, state, PushEvent(1, 0, 0, 0))
    assert [p.shard for p in actions[-1].pushes] == [0, 1, 2]
    assert state.version == 1
    assert modes.may_pull(policy, state, 0)


def test_pushes_of_slow_workers_are_dropped():
    policy = ConsistencyPolicy("sync", 3, replicas_to_aggregate=2)
    state, actions = run(
        policy, PushState(), PushEvent(2, 0, 0, 8), PushEvent(0, 0, 0, 8), PushEvent(1, 0, 0, 8)
    )
    assert [type(a) for a in actions] == [Hold, Hold, Apply, Drop]
    assert state.dropped == {1: 0}
    _, actions = run(policy, state, PushEvent(1, 0, 0, 8), PushEvent(1, 1, 1, 8))
    assert [type(a) for a in actions] == [Repeat, Hold]


def test_a_repeated_push_that_is_held_is_awaited():
    _, actions = run(ConsistencyPolicy("sync", 2), PushState(), PushEvent(0, 0, 0, 8), PushEvent(0, 0, 0, 8))
    assert [type(a) for a in actions] == [Hold, Await]


def test_a_finished_shard_is_not_awaited_until_it_pushes_again():
    policy = ConsistencyPolicy("sync", 2)
    state, actions = run(policy, PushState(), PushEvent(0, 0, 0, 8), ShardFinishedEvent(1))
    assert isinstance(actions[-1], Apply)
    state, actions = run(policy, state, PushEvent(1, 0, 1, 8))
    assert isinstance(actions[-1], Hold)


def test_a_server_that_does_not_lead_follows_decisions():
    policy = ConsistencyPolicy("sync", 3, replicas_to_aggregate=2, is_leader=False)
    state, actions = run(
        policy, PushState(), PushEvent(0, 4, 0, 8), PushEvent(1, 2, 0, 8), PushEvent(2, 9, 0, 8)
    )
    assert [type(a) for a in actions] == [Hold] * 3
    state, actions = run(policy, state, StepDecidedEvent(0, (0, 2)), StepDecidedEvent(0, (0, 2)))
    assert [p.shard for p in actions[0].pushes] == [0, 2]
    assert [type(a) for a in actions] == [Apply, Drop]
    with pytest.raises(InputError, match="without the pushes of shards \\[1\\]"):
        modes.decide(policy, state, StepDecidedEvent(1, (1,)), 0.0)


def test_a_repeated_push_replaces_the_one_that_a_follower_holds():
    policy = ConsistencyPolicy("sync", 2, is_leader=False)
    state, _ = run(policy, PushState(), PushEvent(0, 4, 0, 8), PushEvent(0, 4, 0, 9))
    assert [p.rows for p in state.held] == [9]


def test_bounded_delays_a_shard_that_is_too_far_ahead():
    policy = ConsistencyPolicy("bounded", 2, max_staleness=2)
    state, _ = run(policy, PushState(), *(PushEvent(0, n, 0, 8) for n in range(3)))
    assert not modes.may_pull(policy, state, 0)
    assert modes.find_awaited_shards(policy, state, 0) == [1]
    assert modes.may_pull(policy, state, 1)
    assert modes.may_pull(policy, run(policy, state, PushEvent(1, 0, 0, 8))[0], 0)
    assert modes.may_pull(policy, run(policy, state, ShardFinishedEvent(1))[0], 0)


def test_a_shard_that_comes_back_in_bounded_delays_no_other():
    policy = ConsistencyPolicy("bounded", 2, max_staleness=1)
    state, _ = run(
        policy,
        PushState(),
        PushEvent(1, 0, 0, 8),
        ShardFinishedEvent(1),
        *(PushEvent(0, n, 0, 8) for n in range(50)),
    )
    state, _ = run(policy, state, PushEvent(1, 1, 0, 8))
    assert modes.may_pull(policy, state, 0)


def test_after_a_checkpoint_each_shard_may_be_ahead_once():
    policy = ConsistencyPolicy("async", 1)
    state, _ = run(policy, PushState(), PushEvent(0, 0, 0, 8))
    state = modes.mark_restored(policy, PushState.from_json(state.to_json()))
    state, actions = run(policy, state, PushEvent(0, 5, 9, 8), PushEvent(0, 9, 9, 8))
    assert actions[0] == modes.CountLost(0, 4)
    assert [type(a) for a in actions[1:]] == [Apply, Refuse]


def test_pushes_that_a_restored_server_held_are_counted_as_lost():
    policy = ConsistencyPolicy("sync", 2, is_leader=False)
    state = modes.mark_restored(policy, PushState(version=4, applied={0: 8, 1: 8}))
    state, actions = run(policy, state, PushEvent(1, 9, 4, 8), StepDecidedEvent(4, (0, 1)))
    assert actions == [Hold(PushEvent(1, 9, 4, 8)), modes.CountLost(0, 1)]
    assert state.version == 5
    assert not state.held


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "sync", "replicas_to_aggregate": 3}, r"must be in \[1, 2\]"),
        ({"mode": "async", "replicas_to_aggregate": 1}, 'is for mode="sync"'),
        ({"mode": "lazy"}, "mode must be one of"),
        ({"mode": "bounded", "max_staleness": -1}, "max_staleness must be at least 0"),
    ],
)
def test_bad_policies_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        ConsistencyPolicy(total_replicas=2, **arguments)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_sequence_is_consumed_once(data: Any):
    total = data.draw(st.integers(1, 4))
    mode = data.draw(st.sampled_from(modes.MODES))
    needed = data.draw(st.integers(1, total)) if mode == "sync" else None
    policy, state = ConsistencyPolicy(mode, total, needed), PushState()
    consumed: dict[int, list[int]] = {shard: [] for shard in range(total)}
    for _ in range(data.draw(st.integers(1, 60))):
        shard = data.draw(st.integers(0, total - 1))
        if data.draw(st.integers(0, 9)) == 0:
            event: Any = ShardFinishedEvent(shard)
        else:
            back = data.draw(st.integers(0, 2))
            sequence = max(0, state.applied.get(shard, -1) + 2 - data.draw(st.integers(0, 3)))
            event = PushEvent(shard, sequence, max(0, state.version - back), data.draw(st.integers(0, 9)))
        state, actions = modes.decide(policy, state, event, 0.0)
        state.validate(policy)
        state = data.draw(st.sampled_from([state, state, _rewritten(state)]))
        for action in actions:
            if isinstance(action, Apply):
                for push in action.pushes:
                    consumed[push.shard].append(push.sequence)
            elif isinstance(action, Drop):
                consumed[action.push.shard].append(action.push.sequence)
    for shard, sequences in consumed.items():
        assert sequences == list(range(len(sequences)))
        assert state.applied.get(shard, -1) == len(sequences) - 1


def _rewritten(state: PushState) -> PushState:
    """As it is after it was saved and read, except for what is held."""
    from dataclasses import replace

    return replace(PushState.from_json(state.to_json()), held=state.held, held_since=state.held_since)
