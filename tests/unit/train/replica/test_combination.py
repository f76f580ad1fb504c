"""Values of shards become that of the whole batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.train.replica.combination import Operation, combine

ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(ROWS, st.integers(0, 3), st.randoms())
def test_each_operation_gives_what_one_replica_has(rows, start, random) -> None:
    """A state that is moved by the rows of the whole batch at once, or of its shards."""
    data = [np.array([float(random.randint(-5, 5)) for _ in range(count)]) for count in rows]
    whole, shares = np.concatenate(data), np.array(rows) / sum(rows)

    def combined(operation, move):
        return combine(operation, np.array([[move(part)] for part in data]), shares)[0]

    assert combined(Operation.SUM_OF_CHANGES, lambda part: part.sum()) == whole.sum()
    assert combined(Operation.LARGEST, lambda part: max(start, part.max())) == max(start, whole.max())
    assert combined(Operation.SMALLEST, lambda part: min(start, part.min())) == min(start, whole.min())
    assert combined(Operation.FIRST, lambda part: start + 1) == start + 1
    moving = combined(Operation.MEAN, lambda part: 0.8 * start + 0.2 * part.mean())
    np.testing.assert_allclose(moving, 0.8 * start + 0.2 * whole.mean(), rtol=1e-9, atol=1e-12)


def test_shapes_are_kept_and_nothing_is_shared() -> None:
    values, shares = np.arange(12.0).reshape(2, 2, 3), np.array([0.25, 0.75])
    for operation in Operation:
        result = combine(operation, values, shares)
        assert result.shape == (2, 3)
        assert not np.shares_memory(result, values)
