"""When a push becomes an update: the machine of the three modes, driven by hypothesis."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import InputError
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


class Job:
    """Workers of a shard each, which train fit after fit on one server, as `ParameterServerStrategy` does.

    A worker pushes, waits for its answer, pulls if it may, and ends its fit after its last push. It begins
    the next fit once all have ended this one.
    """

    def __init__(self, policy: ConsistencyPolicy, steps: list[list[int]]) -> None:
        """`steps` of each fit, by shard."""
        self.policy, self.state = policy, PushState()
        self.steps = steps
        shards = range(policy.total_replicas)
        self.fit = dict.fromkeys(shards, 0)
        #: Version that each worker has pulled; the sequence that it waits for, or None.
        self.pulled, self.waits = dict.fromkeys(shards, 0), dict.fromkeys(shards)
        self.told: set[tuple[int, int]] = set()
        self.consumed: dict[int, list[int]] = {shard: [] for shard in shards}
        self.updates: list[tuple[tuple[int, int], ...]] = []

    def decide(self, event: Any) -> None:
        self.state, actions = modes.decide(self.policy, self.state, event, 0.0)
        self.state.validate(self.policy)
        for action in actions:
            assert not isinstance(action, Refuse), action
            if isinstance(action, Apply):
                self.updates.append(tuple((push.shard, push.sequence) for push in action.pushes))
                for push in action.pushes:
                    self.consumed[push.shard].append(push.sequence)
            elif isinstance(action, Drop):
                self.consumed[action.push.shard].append(action.push.sequence)

    def end_of(self, shard: int) -> int:
        """Pushes of a shard up to the end of its fit."""
        return sum(fit[shard] for fit in self.steps[: self.fit[shard] + 1])

    def is_over(self, shard: int) -> bool:
        return self.fit[shard] == len(self.steps)

    def can_go_on(self, shard: int) -> bool:
        if self.is_over(shard):
            return False
        if self.waits[shard] is not None:
            is_answered = self.waits[shard] <= self.state.applied.get(shard, -1)
            return is_answered and modes.may_pull(self.policy, self.state, shard)
        if (shard, self.fit[shard]) in self.told:
            return all((other, self.fit[shard]) in self.told for other in self.fit)
        return True

    def go_on(self, shard: int) -> None:
        fit, following = self.fit[shard], self.state.applied.get(shard, -1) + 1
        if self.waits[shard] is not None:
            self.waits[shard], self.pulled[shard] = None, self.state.version
        elif (shard, fit) in self.told:
            self.fit[shard], self.pulled[shard] = fit + 1, self.state.version
        elif following < self.end_of(shard):
            self.push(shard, following)
            self.waits[shard] = following
        else:
            self.decide(ShardFinishedEvent(shard, fit))
            self.told.add((shard, fit))

    def push(self, shard: int, sequence: int) -> None:
        self.decide(PushEvent(shard, sequence, self.pulled[shard], 8))

    def lose(self, shard: int) -> None:
        """Another incarnation of a worker continues behind what was applied, or held, and ends a fit
        again."""
        held = [p.sequence for p in self.state.held if p.shard == shard]
        self.waits[shard], self.pulled[shard] = held[0] if held else None, self.state.version
        if not self.is_over(shard):
            self.told.discard((shard, self.fit[shard]))
        for fit in range(self.fit[shard]):
            self.decide(ShardFinishedEvent(shard, fit))


def train(job: Job, seed: int) -> None:
    """Have workers continue in any order, some of them late, and with losses, until each fit has ended."""
    rng, shards = random.Random(seed), list(job.fit)
    late = {shard for shard in shards if rng.random() < 0.3}
    losses = rng.randrange(7)
    while not all(map(job.is_over, shards)):
        ready = [shard for shard in shards if job.can_go_on(shard)]
        assert ready, f"the job stands still at {job.state}"
        shard = rng.choice([s for s in ready if s not in late] or ready)
        event = rng.randrange(6)
        if event == 0 and losses:
            losses -= 1
            if not all((other, job.fit[shard]) in job.told for other in shards):  # else it knows of the end
                job.lose(shard)
        elif event == 1 and job.waits[shard] is not None:
            job.push(shard, job.waits[shard])  # the answer was lost, so it's asked for again
        else:
            job.go_on(shard)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_fit_ends_and_no_push_counts_twice(data: Any):
    total = data.draw(st.integers(1, 4))
    mode = data.draw(st.sampled_from(modes.MODES))
    needed = data.draw(st.integers(1, total)) if mode == "sync" else None
    policy = ConsistencyPolicy(mode, total, needed, max_staleness=data.draw(st.integers(0, 3)))
    fits = st.lists(st.integers(0, 6), min_size=total, max_size=total)
    job = Job(policy, data.draw(st.lists(fits, min_size=1, max_size=3)))
    train(job, data.draw(st.integers(0, 2**32)))
    assert job.consumed == {s: list(range(sum(fit[s] for fit in job.steps))) for s in range(total)}
    assert len(job.updates) == job.state.version
    assert not job.state.held and not job.state.finished


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_step_of_all_shards_misses_none_in_any_fit(data: Any):
    total = data.draw(st.integers(2, 4))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    job = Job(ConsistencyPolicy("sync", total), [[length] * total for length in lengths])
    train(job, data.draw(st.integers(0, 2**32)))
    assert job.updates == [tuple((s, step) for s in range(total)) for step in range(sum(lengths))]


def test_once_all_have_finished_all_are_awaited_again():
    policy = ConsistencyPolicy("sync", 2)
    ends = [ShardFinishedEvent(0, 0), ShardFinishedEvent(1, 0)]
    # One of them was started again, and tells of its end once more.
    state, _ = run(policy, PushState(), *ends, ShardFinishedEvent(0, 0))
    assert modes.find_awaited_shards(policy, state) == [0, 1]
    state, actions = run(policy, state, PushEvent(1, 0, 0, 8))
    assert [type(a) for a in actions] == [Hold]


def test_what_comes_late_at_the_end_of_a_fit_is_applied():
    policy = ConsistencyPolicy("sync", 3, replicas_to_aggregate=2)
    state, actions = run(policy, PushState(), PushEvent(0, 0, 0, 8), PushEvent(2, 0, 0, 8))
    state, actions = run(policy, state, PushEvent(1, 0, 0, 8), PushEvent(1, 1, 1, 8))
    assert [type(a) for a in actions] == [Drop, Hold]
    state, actions = run(policy, state, ShardFinishedEvent(0, 0), ShardFinishedEvent(2, 0))
    assert actions == [Apply((PushEvent(1, 1, 1, 8),), 1)]
    _, actions = run(policy, state, PushEvent(1, 2, 2, 8))
    assert [type(a) for a in actions] == [Hold, Apply]


def _rewritten(state: PushState) -> PushState:
    """As it is after it was saved and read, except for what is held."""
    from dataclasses import replace

    return replace(PushState.from_json(state.to_json()), held=state.held, held_since=state.held_since)
