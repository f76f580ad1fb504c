"""Batches as lists of arrays: the fast path of flat tuples gives what Keras gives."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.replica.leaves import count_rows, flatten_batch, map_batch

X, Y = np.zeros((3, 2)), np.zeros(3)


@pytest.mark.parametrize("batch", [(X, Y), ({"b": X, "a": Y}, Y), X, [X, (Y, Y)]])
def test_leaves_are_those_of_keras_in_its_order(batch: Any) -> None:
    expected = keras.tree.flatten(batch)
    assert [id(leaf) for leaf in flatten_batch(batch)] == [id(leaf) for leaf in expected]
    assert count_rows(batch) == 3
    halved = map_batch(lambda leaf: leaf[:1], batch)
    assert type(halved) is type(batch)
    assert [len(leaf) for leaf in keras.tree.flatten(halved)] == [1] * len(expected)
