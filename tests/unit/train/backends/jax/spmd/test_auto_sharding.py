"""Which axis of a variable is sharded."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((8, 6), ("model", None)),
        ((7, 6), (None, "model")),
        ((8, 8), (None, "model")),
        ((7, 5), (None, None)),
        ((3, 3, 2, 16), (None, None, None, "model")),
        ((8,), (None,)),
        ((), ()),
    ],
)
def test_the_largest_axis_that_can_be_divided_is_spread(shape: Any, axes: Any):
    from insitu.train.backends.jax.spmd.auto_sharding import shard_largest_axis

    assert shard_largest_axis(shape, {"data": 4, "model": 2}) == axes
    assert shard_largest_axis(shape, {"data": 4}) == (None,) * len(shape)
