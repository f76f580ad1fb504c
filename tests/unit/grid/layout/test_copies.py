"""Copies of partitions and their states."""

from __future__ import annotations

import pytest

from insitu.base.spec import NodeId, PlacedCopy
from insitu.grid.layout import flip_copies, reconcile_copies

A, B, C = (NodeId(name) for name in "abc")


def test_a_flip_puts_the_target_into_the_place_of_the_source():
    copies = [PlacedCopy(0, A), PlacedCopy(0, B), PlacedCopy(0, C, "copying"), PlacedCopy(1, A)]
    assert flip_copies(copies, [(0, A, C)]) == [PlacedCopy(0, C), PlacedCopy(0, B), PlacedCopy(1, A)]
    assert flip_copies(copies, [(0, None, C)]) == [*copies[:2], PlacedCopy(1, A), PlacedCopy(0, C)]


@pytest.mark.parametrize("move", [(0, A, B), (1, A, C), (0, C, C)])
def test_a_flip_needs_a_copy_that_has_arrived_and_one_to_replace(move: tuple[int, NodeId, NodeId]):
    copies = [PlacedCopy(0, A), PlacedCopy(0, B), PlacedCopy(0, C, "copying")]
    with pytest.raises(ValueError, match="partition"):
        flip_copies(copies, [move])


def test_copies_follow_what_a_store_holds():
    copies = [PlacedCopy(0, A), PlacedCopy(0, B), PlacedCopy(1, A, "lost"), PlacedCopy(2, A, "copying")]
    changed = [PlacedCopy(0, A, "lost"), PlacedCopy(0, B), PlacedCopy(1, A), PlacedCopy(2, A, "copying")]
    assert reconcile_copies(copies, A, {1, 2}) == (changed, [0], [1])
    assert reconcile_copies(changed, A, {1, 2}) == (changed, [], [])
    assert reconcile_copies(copies, C, ()) == (copies, [], [])
