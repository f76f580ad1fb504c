"""The barrier in shared memory, and eviction."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
from exchange_sessions import run_together

from insitu.exchange import memory
from insitu.exchange.plan.transport import MemberLost
from insitu.exchange.shm_barrier import (
    ShmBarrier,
    SignatureMismatch,
    SpinPolicy,
    choose_spin_policy,
    count_barrier_bytes,
)

RANKS = (4, 5, 6)


@contextlib.contextmanager
def _make_barriers(
    find_dead: Callable[[], Sequence[int]] = lambda: (), stall_timeout: float = 30.0
) -> Iterator[list[ShmBarrier]]:
    size = count_barrier_bytes(len(RANKS))
    file = memory.create("insitu-test", size)
    try:
        yield [
            ShmBarrier(
                memory.adopt(os.dup(file), size),
                0,
                member,
                RANKS,
                SpinPolicy(2),
                find_dead,
                stall_timeout,
            )
            for member in range(len(RANKS))
        ]
    finally:
        os.close(file)


def test_all_members_pass_each_phase_together() -> None:
    arrived = [0] * len(RANKS)

    def run(member: int, barrier: ShmBarrier) -> None:
        for phase in range(1, 50):
            arrived[member] = phase
            barrier.wait(phase)
            assert min(arrived) >= phase
            assert barrier.phase == phase

    with _make_barriers() as barriers:
        results = run_together([lambda m=m, b=b: run(m, b) for m, b in enumerate(barriers)])
    assert results == [None] * len(RANKS)


def test_different_signatures_raise_on_all_members() -> None:
    with _make_barriers() as barriers:
        results = run_together([lambda m=m, b=b: b.wait(m) for m, b in enumerate(barriers)])
    assert all(isinstance(result, SignatureMismatch) for result in results)


@pytest.mark.parametrize("reason", ["died", "left the group"])
def test_dead_member_is_evicted_for_all(reason: str) -> None:
    with _make_barriers(lambda: [6]) as barriers:
        if reason == "left the group":
            barriers[2].leave()
        results = run_together([lambda b=b: b.wait(1) for b in barriers[:2]])
        assert [(result.rank, result.reason) for result in results] == [(6, reason)] * 2
        assert barriers[2].is_evicted()
        with pytest.raises(MemberLost) as caught:
            barriers[2].wait(1)
        assert (caught.value.rank, caught.value.reason) == (6, "was evicted by the other ranks")


def test_member_without_progress_is_evicted() -> None:
    with _make_barriers(stall_timeout=0.1) as barriers:
        with pytest.raises(MemberLost) as caught:
            barriers[0].wait(1)
        assert (caught.value.rank, caught.value.reason) == (5, "made no progress for 0.1 s")
        assert barriers[1].is_evicted() and not barriers[2].is_evicted()


def test_survivors_finish_for_a_lost_member_and_raise_completed() -> None:
    finished: list[int] = []
    with _make_barriers(find_dead=lambda: [5]) as barriers:
        results = run_together(
            [lambda b=b: b.wait_and_finish(1, finished.append) for b in (barriers[0], barriers[2])]
        )
    assert [(result.rank, result.completed) for result in results] == [(5, True)] * 2
    assert finished == [1, 1], "each survivor makes sure of it"


def test_loss_on_another_host_ends_the_wait() -> None:
    with _make_barriers() as barriers:
        barriers[0].announce_loss(9)
        with pytest.raises(MemberLost) as caught:
            barriers[1].wait(1)
    assert (caught.value.rank, caught.value.reason) == (9, "was lost")


def test_sleeping_member_reports_whom_it_waits_for() -> None:
    waited_for: list[int] = []
    with _make_barriers(stall_timeout=0.1) as barriers:
        barriers[0].on_sleep = waited_for.append
        with pytest.raises(MemberLost):
            barriers[0].wait(1)
    assert set(waited_for) == {5}


def test_spinning_only_on_own_processors() -> None:
    assert choose_spin_policy(4, crowded=False, same_process=False).compiled_spins > 0
    assert choose_spin_policy(4, crowded=True, same_process=False).compiled_spins == 0
    assert choose_spin_policy(4, crowded=False, same_process=True).compiled_spins == 0
