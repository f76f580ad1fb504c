"""Positions name units: equal for the same unit, different for any two."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.train.elastic.position import (
    EPOCH,
    LOOP,
    PREDICT,
    RESTORE,
    SETUP,
    TEST,
    TRAIN,
    LoopPosition,
)

KINDS = [SETUP, RESTORE, TRAIN, TEST, EPOCH, PREDICT, LOOP]
NUMBERS = st.integers(0, 5)
POSITIONS = st.builds(LoopPosition, NUMBERS, st.sampled_from(KINDS), NUMBERS, NUMBERS, NUMBERS, NUMBERS)


@given(POSITIONS)
def test_json_keeps_a_position(position: LoopPosition) -> None:
    assert LoopPosition.from_json(json.loads(json.dumps(position.to_json()))) == position


@given(POSITIONS)
def test_the_next_unit_has_another_position(position: LoopPosition) -> None:
    following = [position.next_step(), position.at_test(position.test + 1)]
    assert position not in following
    assert all(
        (p.call, p.depth, p.epoch) == (position.call, position.depth, position.epoch) for p in following
    )


def test_the_units_of_an_epoch_follow_each_other() -> None:
    position = LoopPosition(2, TRAIN, 1).at_step(3, 0).next_step().next_step()
    assert position == LoopPosition(2, TRAIN, 1, epoch=3, step=2)
    position = position.at_test(0).at_test(1)
    assert position == LoopPosition(2, TEST, 1, epoch=3, step=2, test=1)
    # The end of the epoch still says how much of it is done.
    assert position.at_epoch_end() == LoopPosition(2, EPOCH, 1, epoch=3, step=2, test=1)
    assert position.at_epoch_end().at_step(4, 0) == LoopPosition(2, TRAIN, 1, epoch=4)


def test_a_nested_call_has_positions_of_its_own() -> None:
    outer, nested = LoopPosition(0, TEST, depth=1), LoopPosition(0, TEST, depth=2)
    assert outer != nested
    assert outer.numbers != nested.numbers


def test_replicas_may_differ_before_units_that_make_them_equal() -> None:
    assert [kind for kind in KINDS if LoopPosition(0, kind).is_setup] == [SETUP, RESTORE]


def test_nobody_changes_a_position() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoopPosition(0, TRAIN).step = 1  # type: ignore[misc]


def test_a_position_reads_as_words() -> None:
    assert str(LoopPosition(1, TRAIN, 1, 2, 3)) == "call 1 train epoch 2 step 3"
    assert str(LoopPosition(1, TEST, 1, 2, 3, 4)) == "call 1 test epoch 2 step 3 test 4"
