"""Keys of a batch become row indices, and their rows are pulled once each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from torch_tree import use_torch_tree

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.train.parameter_server.lookup import TableLookup, find_key_inputs


class Source:
    """A table whose row for a key is that key."""

    def __init__(self) -> None:
        self.pulled: list[list[int]] = []

    def pull_rows(self, table: str, keys: Any, *, create: bool) -> Any:
        self.pulled.append(keys.tolist())
        return keys[:, None].astype("float32")


class AttachedTable:
    """The table of a layer that nobody asks for rows."""


def attached(max_keys: int) -> Any:
    layer = insitu.layers.Embedding(1, name="table")
    layer.attach(AttachedTable(), max_keys)  # type: ignore[arg-type]
    return layer


def test_distinct_keys_are_pulled_once_and_replaced_by_their_index() -> None:
    layer, source = attached(4), Source()
    lookup = TableLookup(source, [layer], [(0,)])
    batch = lookup.pull((np.array([[9, -2], [9, 2**40]]), np.zeros(2)))
    assert source.pulled == [[-2, 9, 2**40]]
    assert batch.data[0].tolist() == [[1, 0], [1, 2]] and batch.data[0].dtype == np.int32
    with lookup.rows_loaded(batch):
        assert layer.rows.numpy()[:, 0].tolist() == [-2, 9, 2**40, 0]
        assert layer(batch.data[0]).numpy()[..., 0].tolist() == [[9, -2], [9, 2**40]]
    assert lookup.example((np.zeros((1, 2), "int64"), np.zeros(1)))[0].dtype == np.int32


def test_a_batch_is_split_by_the_room_of_its_layers() -> None:
    lookup = TableLookup(Source(), [attached(4)], [(0,)])
    data = (np.arange(10).reshape(5, 2), np.arange(5))
    assert [len(piece[1]) for piece in lookup.pieces(data)] == [2, 2, 1]
    with pytest.raises(TrainingError, match=r"room for 4 keys.*Received: 10 distinct keys.*max_keys"):
        lookup.pull(data)


@pytest.mark.parametrize("keys", [np.array([0.5]), np.array(["a"]), np.array([2**63], "uint64")])
def test_keys_are_integers(keys: Any) -> None:
    with pytest.raises(InputError, match="Keys of the Embedding 'table' must be"):
        TableLookup(Source(), [attached(4)], [(0,)]).pull((keys,))


def test_keys_come_from_inputs_that_nothing_else_reads() -> None:
    key, other = keras.Input((), dtype="int64", name="key"), keras.Input((1,), name="other")
    layer = insitu.layers.Embedding(1, name="table")
    model = keras.Model({"key": key, "other": other}, keras.layers.Add()([layer(key), other]))
    example = ({"other": np.zeros((1, 1)), "key": np.zeros(1, "int64")}, np.zeros(1))
    assert find_key_inputs(model, [layer], example) == [(0,)]  # in Keras' order of names
    read = keras.Model({"key": key, "other": other}, [layer(key), keras.ops.cast(key, "float32")])
    with pytest.raises(TrainingError, match="for Embeddings alone"):
        find_key_inputs(read, [layer], example)
    computed_keys = keras.Model({"key": key, "other": other}, layer(key + 1))
    with pytest.raises(TrainingError, match="take its keys from an input"):
        find_key_inputs(computed_keys, [layer], example)


@pytest.mark.torch
def test_dictionaries_keep_the_order_of_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's tree gives them sorted, and a model may read inputs by position."""
    use_torch_tree(monkeypatch)
    data = ({"keys": np.array([[7, 7]]), "age": np.array([30])},)
    lookup = TableLookup(Source(), [attached(4)], [(1,)])  # age, then keys
    for batch in (lookup.pull(data).data, lookup.example(data)):
        assert [(name, value.tolist()) for name, value in batch[0].items()] == [
            ("keys", [[0, 0]]),
            ("age", [30]),
        ]
