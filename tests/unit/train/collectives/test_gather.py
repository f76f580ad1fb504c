"""What a group gathers is by shard, also where a task has none or several, and rows are few or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import insitu.exchange
from insitu.base.errors import InputError
from insitu.train.collectives.gather import (
    barrier_token,
    gather_bytes,
    gather_counts,
    gather_rows,
    gather_sizes,
    squeeze_shards,
)


@pytest.fixture(params=[1, 3])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A group of one task with so many shards."""
    shards = range(request.param)
    with insitu.exchange.join(0, ["127.0.0.1:1"], shards=list(shards), num_shards=len(shards)) as joined:
        yield joined


def test_one_shard_has_no_leading_axis() -> None:
    assert squeeze_shards(np.zeros((1, 4))).shape == (4,)
    assert squeeze_shards(np.zeros((2, 4))).shape == (2, 4)


def test_counts_are_those_of_each_shard(group: Any) -> None:
    own = [7 + shard for shard in group.shards]
    assert gather_counts(group, own) == own
    assert gather_sizes(group, 5) == [5] * len(own)
    assert group.all_gather(barrier_token(group)).shape == (len(own), 1)


def test_bytes_of_any_length_come_back_whole(group: Any) -> None:
    own = [b"x" * (9 * shard) for shard in group.shards]
    assert gather_bytes(group, own) == own
    assert gather_bytes(group, [b""] * len(own)) == [b""] * len(own)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64", "bool"])
def test_rows_keep_their_dtype_and_shape(group: Any, dtype: str) -> None:
    rows = [np.full((shard + 1, 3), shard % 2, dtype) for shard in group.shards]
    gathered = gather_rows(group, [{"y": leaf} for leaf in rows], {"y": np.zeros((1, 3), dtype)})
    assert gathered["y"].dtype == dtype
    np.testing.assert_array_equal(gathered["y"], np.concatenate(rows))


def test_a_shard_without_rows_adds_none(group: Any) -> None:
    outputs = [None for _ in group.shards]
    assert gather_rows(group, outputs, np.zeros((1, 2), "float32")).shape == (0, 2)


def test_rows_of_another_shape_than_those_before_are_refused(group: Any) -> None:
    outputs = [np.ones((2, 3), "float32") for _ in group.shards]
    with pytest.raises(InputError, match=r"rows of shape \(3,\), after rows of shape \(5,\)"):
        gather_rows(group, outputs, np.zeros((1, 5), "float32"))
