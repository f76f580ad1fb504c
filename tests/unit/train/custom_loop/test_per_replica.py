"""Values that differ by replica."""

from __future__ import annotations

import pytest

from insitu.base.errors import TrainingError
from insitu.train.custom_loop.per_replica import PerReplica, local_values, merge_per_replica


def test_structures_are_merged_and_taken_apart() -> None:
    assert merge_per_replica([{"a": 1}]) == {"a": 1}
    merged = merge_per_replica([{"a": 1, "b": 2}, {"a": 3, "b": 4}])
    assert merged["a"].values == (1, 3) and repr(merged["b"]) == "PerReplica(2, 4)"
    assert local_values({"x": merged["a"], "y": 7}, 2) == ({"x": 1, "y": 7}, {"x": 3, "y": 7})
    with pytest.raises(TrainingError, match="which has 3 here"):
        local_values(PerReplica((1, 2)), 3)
