from __future__ import annotations

from insitu.base.spec import NodeId
from insitu.cluster.decide import CopyVersion, choose_copy_holders, choose_newest_copy

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def test_two_hosts_keep_copies_and_those_that_have_one_go_on() -> None:
    assert choose_copy_holders([A, B, C], ()) == (A, B)
    assert choose_copy_holders([A, B, C], {C}) == (C, A)
    assert choose_copy_holders([B, C], {A, B}) == (B, C)
    assert choose_copy_holders([], {A}) == ()


def test_the_copy_of_the_highest_term_counts_then_that_with_the_longest_journal() -> None:
    copies = {A: CopyVersion(0, 90), B: CopyVersion(1, 7), C: CopyVersion(1, 7)}
    assert choose_newest_copy(copies) == B
    assert choose_newest_copy({A: CopyVersion(1, 3), B: CopyVersion(1, 4)}) == B
    assert choose_newest_copy({}) is None
