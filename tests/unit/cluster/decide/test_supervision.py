"""Which supervisors a head starts, and when one ends: by cases, and in drawn histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import NodeId
from insitu.cluster.decide.holders import RETRY_SECONDS
from insitu.cluster.decide.supervision import (
    JOB_LEASE_SECONDS,
    SETTLED_SECONDS,
    Starts,
    SupervisedJob,
    choose_starts,
    count_seconds_left,
)

A, B = NodeId("a"), NodeId("b")
BOTH = {A, B}
LOST, HELD = SupervisedJob(5, False), SupervisedJob(5, True)


@pytest.mark.parametrize(
    ("passed", "left"),
    [(0.0, 7.0), (2.0, 5.0), (6.75, 0.25), (7.0, 0.0), (JOB_LEASE_SECONDS, 0.0), (1e6, 0.0)],
)
def test_a_supervisor_ends_before_its_lease_can(passed: float, left: float) -> None:
    assert count_seconds_left(100.0, 100.0 + passed) == left
    assert passed + left < JOB_LEASE_SECONDS or passed >= JOB_LEASE_SECONDS


def test_a_job_without_a_supervisor_gets_one_once() -> None:
    starts, begun = choose_starts(Starts(), {"held": HELD, "lost": LOST}, BOTH, BOTH, 0.0)
    assert begun == ("lost",)
    assert choose_starts(starts, {"lost": LOST}, BOTH, BOTH, 100.0)[1] == ()
    starts = starts.end("lost", 100.0, failed=False)
    assert choose_starts(starts, {"lost": HELD}, BOTH, BOTH, 100.0)[1] == ()
    assert choose_starts(starts, {"lost": LOST}, BOTH, BOTH, 100.0)[1] == ("lost",)  # lost again


def test_a_new_head_waits_for_agents_until_all_are_there_or_no_more_come() -> None:
    jobs = {"lost": LOST}
    starts, begun = choose_starts(Starts(), jobs, set(), BOTH, 50.0)
    assert begun == () and choose_starts(starts, jobs, set(), BOTH, 1e6)[1] == ()
    starts, begun = choose_starts(starts, jobs, {A}, BOTH, 60.0)
    assert begun == ()
    assert choose_starts(starts, jobs, {A}, BOTH, 60.0 + SETTLED_SECONDS - 0.1)[1] == ()
    assert choose_starts(starts, jobs, {A}, BOTH, 60.0 + SETTLED_SECONDS)[1] == ("lost",)
    assert choose_starts(starts, jobs, BOTH, BOTH, 60.1)[1] == ("lost",)


def test_a_start_that_failed_is_tried_again_later_each_time_unless_the_job_is_stopped() -> None:
    first, _ = RETRY_SECONDS
    starts, _ = choose_starts(Starts(), {"lost": LOST}, BOTH, BOTH, 0.0)
    starts = starts.end("lost", 10.0, failed=True)
    assert choose_starts(starts, {"lost": LOST}, BOTH, BOTH, 10.0 + first - 0.1)[1] == ()
    starts, begun = choose_starts(starts, {"lost": LOST}, BOTH, BOTH, 10.0 + first)
    assert begun == ("lost",)
    starts = starts.end("lost", 20.0, failed=True)
    assert starts.failures["lost"].retry_at == 20.0 + 2 * first
    starts, begun = choose_starts(starts, {}, BOTH, BOTH, 100.0)
    assert begun == () and starts.failures == {}


names = st.sampled_from("uvwxyz")
steps = st.tuples(
    st.floats(0.0, 5.0),
    st.dictionaries(names, st.booleans()),
    st.sets(st.sampled_from([A, B])),
    st.lists(st.tuples(names, st.booleans())),
)


@given(st.lists(steps, max_size=30))
def test_no_supervisor_is_started_beside_another_one_and_each_lost_job_gets_one(
    history: list[tuple[float, dict[str, bool], set[NodeId], list[tuple[str, bool]]]],
) -> None:
    now, starts = 0.0, Starts()
    under_way = set[str]()
    for seconds, held, connected, ended in history:
        now += seconds
        for job, failed in ended:
            if job in under_way:
                under_way.discard(job)
                starts = starts.end(job, now, failed=failed)
        jobs = {job: SupervisedJob(1, is_held) for job, is_held in held.items()}
        starts, begun = choose_starts(starts, jobs, connected, BOTH, now)
        assert all(job in held and not held[job] and job not in under_way for job in begun)
        assert not begun or connected
        under_way |= set(begun)
        assert len(under_way) <= 4 and starts.under_way == under_way
    # From now on nothing else fails.
    lost = dict.fromkeys("uvwxyz", LOST)
    for _ in range(3):
        for job in under_way:
            starts = starts.end(job, now, failed=False)
            lost.pop(job, None)
        now += RETRY_SECONDS[1]
        starts, begun = choose_starts(starts, lost, BOTH, BOTH, now)
        under_way = set(begun)
    assert not set(lost) - under_way
