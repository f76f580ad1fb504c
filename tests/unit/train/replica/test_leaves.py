"""Batches as lists of arrays: the fast path of flat tuples gives what Keras gives."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from torch_tree import use_torch_tree

from insitu.train.replica.leaves import count_rows, flatten_batch, map_batch, pack_batch

X, Y = np.zeros((3, 2)), np.zeros(3)


@pytest.mark.parametrize("batch", [(X, Y), ({"b": X, "a": Y}, Y), X, [X, (Y, Y)]])
def test_leaves_are_those_of_keras_in_its_order(batch: Any) -> None:
    expected = keras.tree.flatten(batch)
    assert [id(leaf) for leaf in flatten_batch(batch)] == [id(leaf) for leaf in expected]
    assert count_rows(batch) == 3
    halved = map_batch(lambda leaf: leaf[:1], batch)
    assert type(halved) is type(batch)
    assert [len(leaf) for leaf in keras.tree.flatten(halved)] == [1] * len(expected)


@pytest.fixture(params=["the backend's tree", pytest.param("PyTorch's tree", marks=pytest.mark.torch)])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras' functions of structures; PyTorch's do otherwise with dictionaries."""
    if request.param == "PyTorch's tree":
        use_torch_tree(monkeypatch)


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("named", [{"b": X, "a": Y}, {"b": None, "c": X, "a": Y}])
def test_leaves_come_back_under_their_names(named: Any) -> None:
    batch = (named, X)
    packed = pack_batch(batch, flatten_batch(batch))
    assert packed[1] is X
    assert [(name, id(leaf)) for name, leaf in packed[0].items()] == [(n, id(v)) for n, v in named.items()]


@pytest.mark.parametrize("batch", [(X, Y), X])
def test_leaves_without_names_come_back(batch: Any) -> None:
    packed = pack_batch(batch, flatten_batch(batch))
    assert type(packed) is type(batch)
    assert [id(leaf) for leaf in flatten_batch(packed)] == [id(leaf) for leaf in flatten_batch(batch)]
