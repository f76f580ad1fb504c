"""Copies of partitions and their states."""

from __future__ import annotations

import pytest

from insitu.grid.layout import PlacedCopy, flip_copies, owners_by_partition
from insitu.spec import NodeId

A, B, C = (NodeId(name) for name in "abc")


def test_owners_are_live_and_lost_ones_stand_in_for_them():
    copies = [PlacedCopy(0, B), PlacedCopy(0, A, "lost"), PlacedCopy(0, C), PlacedCopy(1, A, "lost")]
    assert owners_by_partition([*copies, PlacedCopy(1, B, "copying")]) == {0: (B, C), 1: (A,)}


def test_a_flip_puts_the_target_into_the_place_of_the_source():
    copies = [PlacedCopy(0, A), PlacedCopy(0, B), PlacedCopy(0, C, "copying"), PlacedCopy(1, A)]
    assert flip_copies(copies, [(0, A, C)]) == [PlacedCopy(0, C), PlacedCopy(0, B), PlacedCopy(1, A)]
    assert flip_copies(copies, [(0, None, C)]) == [*copies[:2], PlacedCopy(1, A), PlacedCopy(0, C)]


@pytest.mark.parametrize("move", [(0, A, B), (1, A, C), (0, C, C)])
def test_a_flip_needs_a_copy_that_has_arrived_and_one_to_replace(move: tuple[int, NodeId, NodeId]):
    copies = [PlacedCopy(0, A), PlacedCopy(0, B), PlacedCopy(0, C, "copying")]
    with pytest.raises(ValueError, match="partition"):
        flip_copies(copies, [move])


def test_there_are_three_states():
    with pytest.raises(ValueError, match=r"live, copying, lost.*'gone'"):
        PlacedCopy(0, A, "gone")  # type: ignore[arg-type]
