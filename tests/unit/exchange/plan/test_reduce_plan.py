"""Which member reduces what in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import ExchangeError
from insitu.exchange.native import choose_piece_bytes
from insitu.exchange.plan.reduce_plan import SCRATCH_BYTES, ReducePlan
from insitu.exchange.plan.transport import Members, Reduction

FLOAT = np.dtype(np.float32)


def _make_plan(length: int, shards: list[list[int]], piece_bytes: int | None) -> ReducePlan:
    count = sum(map(len, shards))
    members = Members(0, tuple(map(tuple, shards)), count)
    parts = [np.zeros(max(1, len(own)) * length * 4, np.uint8) for own in shards]
    scratch = np.zeros((len(shards), SCRATCH_BYTES), np.uint8)
    rows = tuple(parts[0].view(FLOAT).reshape(-1, length)[: len(shards[0])]) if length else ()
    reduction = Reduction("sum", FLOAT, length, rows, np.zeros(length, FLOAT))
    return ReducePlan(reduction, members, parts, scratch, piece_bytes)


@given(
    st.integers(1, 300_000),
    st.sampled_from([[[0], [1]], [[0, 2], [1], []], [[], [0]]]),
    st.sampled_from([None, 4096]),
)
def test_pieces_of_all_members_cover_every_row_once(
    length: int, shards: list[list[int]], piece_bytes: int | None
) -> None:
    plan = _make_plan(length, shards, piece_bytes)
    for member in range(len(shards)):
        for piece in plan.make_pieces(member):
            assert len(piece.rows) == sum(map(len, shards)) and len(piece.targets) == len(shards)
            assert len(piece.total) == len(piece.targets[0]) <= plan.longest
            for target in piece.targets:
                target += 1
    assert all((result == 1).all() for result in plan.results)


def test_rows_are_those_of_each_shard_in_order() -> None:
    shards = ((2, 0), (), (1,))
    parts = [np.array([[2.0] * 3, [0.0] * 3], FLOAT), np.zeros(3, FLOAT), np.full(3, 1.0, FLOAT)]
    reduction = Reduction("sum", FLOAT, 3, (), np.zeros(3, FLOAT))
    scratch = np.zeros((3, SCRATCH_BYTES), np.uint8)
    plan = ReducePlan(
        reduction, Members(1, shards, 3), [part.reshape(-1).view(np.uint8) for part in parts], scratch
    )
    assert [row.tolist() for row in plan.rows] == [[shard] * 3 for shard in range(3)]


def test_buffer_that_is_too_small_raises() -> None:
    members = Members(0, ((0,), (1,)), 2)
    reduction = Reduction("sum", FLOAT, 10, (np.zeros(10, FLOAT),), np.zeros(10, FLOAT))
    with pytest.raises(ExchangeError, match=r"on member 1\. Received: 36 bytes"):
        ReducePlan(
            reduction, members, [np.zeros(40, np.uint8), np.zeros(36, np.uint8)], np.zeros((2, 8), np.uint8)
        )


def test_a_row_whose_pieces_exceed_the_scratch_memory_is_refused() -> None:
    """Above 128 GiB a sum was written into the next member's scratch memory."""
    _make_plan(10, [[0], [1]], SCRATCH_BYTES)
    assert choose_piece_bytes(128 << 30) <= SCRATCH_BYTES < choose_piece_bytes((128 << 30) + 1)
    with pytest.raises(ExchangeError, match="A row must have 128 GiB at most"):
        _make_plan(10, [[0], [1]], choose_piece_bytes((128 << 30) + 1))
