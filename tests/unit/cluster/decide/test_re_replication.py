"""When copies are made again, without processes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from agent_facts import LOAD, VERSIONS, WALL, facts
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.spec import NodeId
from insitu.cluster.decide import Membership
from insitu.cluster.decide.membership import Member
from insitu.cluster.decide.re_replication import (
    LOOK_SECONDS,
    RETRY_SECONDS,
    CopyOrder,
    CopyOrders,
    find_copy_order,
    find_departed,
)

A, B, C = map(NodeId, "abc")
ORDER = CopyOrder((A,), (), (), (B,))


def member(node: NodeId, state: str = "alive", heard: float = 0.0, leave_by: float | None = None) -> Member:
    connection = ord(node) if state in ("alive", "silent") else None
    found = Member(facts(node), LOAD, state, WALL, heard, connection, 0.0)  # type: ignore[arg-type]
    return replace(found, leave_by=leave_by)


def cluster(*members: Member) -> Membership:
    return Membership(VERSIONS, {m.facts.node: m for m in members})


@pytest.mark.parametrize("state", ["lost", "left"])
def test_a_node_that_is_away_for_longer_than_the_grace_is_given_up(state: str) -> None:
    members = cluster(member(A), member(B, state, heard=100.0), member(C, "silent"))
    assert find_copy_order(members, 60.0, 160.0) is None
    assert find_copy_order(members, 60.0, 161.0) == CopyOrder((B,), (), (C,), (A,))
    assert find_copy_order(members, None, 9e9) is None


def test_a_node_that_leaves_is_seen_to_at_once_while_it_is_there() -> None:
    members = cluster(member(A), member(B, leave_by=WALL))
    assert find_copy_order(members, None, 0.0) == CopyOrder((), (B,), (), (A,))
    assert find_copy_order(cluster(member(A, leave_by=WALL), member(B, leave_by=WALL)), None, 0.0) is None


def test_a_lost_node_that_is_to_leave_is_given_up_at_once() -> None:
    members = cluster(member(A), member(B, "lost", leave_by=WALL), member(C, "lost"))
    assert find_copy_order(members, None, 0.0) == CopyOrder((), (B,), (C,), (A,))
    assert find_copy_order(members, 60.0, 61.0) == CopyOrder((C,), (B,), (), (A,))
    silent = replace(member(B, "silent", leave_by=WALL), connection=None)
    assert find_copy_order(cluster(member(A), silent), None, 0.0) is None, "it may come back in a moment"


def test_an_order_is_carried_out_once_for_each_change_of_the_catalogue() -> None:
    orders = CopyOrders().begin(ORDER, 1, 0.0, unfinished=False)
    assert orders.running == (ORDER, 1)
    assert orders.begin(ORDER, 2, 1.0, unfinished=False) is orders
    done = orders.end(10.0, failed=False)
    later = 10.0 + LOOK_SECONDS
    assert done.begin(ORDER, 2, later - 1, unfinished=False) is done
    assert done.begin(ORDER, 1, later, unfinished=False) is done
    assert done.begin(ORDER, 2, later, unfinished=False).running == (ORDER, 2)
    assert done.begin(ORDER, 1, later, unfinished=True).running == (ORDER, 1)
    assert done.begin(None, 2, later, unfinished=False) is done


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 3))
def test_pauses_after_failures_grow_and_end(failures: list[bool], change: int) -> None:
    orders, now, pauses = CopyOrders(), 0.0, []
    for failed in failures:
        orders = orders.begin(ORDER, change, now, unfinished=True)
        assert orders.running is not None
        orders = orders.end(now, failed=failed)
        assert orders.running is None and orders.next_at > now
        pauses.append(orders.next_at - now if failed else 0.0)
        now = orders.next_at
    assert all(pause <= RETRY_SECONDS[1] for pause in pauses)
    for before, after in pairwise(pauses):
        assert not (before and after) or after >= before


def test_an_order_whose_node_has_left_since_says_nothing() -> None:
    order = CopyOrder((), (B,), (), (A,))
    assert find_departed(order, cluster(member(A), member(B, leave_by=WALL))) == ()
    assert find_departed(order, cluster(member(A), member(B, "lost"))) == ()
    assert find_departed(order, cluster(member(A), member(B, "left"))) == (B,)
    assert find_departed(order, cluster(member(A, "left"), member(B))) == (A,)
    running = CopyOrders().begin(order, 1, 0.0, unfinished=True)
    ended = running.end(10.0, failed=True, outdated=True)
    assert (ended.failures, ended.done, ended.next_at) == (0, None, 10.0 + LOOK_SECONDS)
    assert running.end(10.0, failed=True, outdated=False).failures == 1
    assert running.end(10.0, failed=False, outdated=True).done == (order, 1)
