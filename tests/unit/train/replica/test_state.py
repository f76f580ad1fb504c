"""What a replica is, as arrays."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from insitu.base.errors import CheckpointError
from insitu.exchange.pages import ALIGNMENT, aligned_empty
from insitu.train.replica.combination import Operation
from insitu.train.replica.state import load_snapshot, read_state, regroup, view, views

UNITS = 200
"""So many that the kernel is worth sparing copies."""


def a_model() -> keras.Model:
    model = keras.Sequential([keras.Input((UNITS,)), keras.layers.Dense(UNITS)])
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def values_like(state, *, aligned: bool = True) -> dict[str, np.ndarray]:
    rng, values = np.random.default_rng(0), {}
    for name, like in views(state).items():
        offset = 0 if aligned else 4
        room = aligned_empty((like.nbytes + offset,), np.dtype(np.uint8))[offset:]
        array = room.view(like.dtype).reshape(like.shape)
        array[...] = (rng.random(like.shape) * 10).astype(like.dtype)
        values[name] = array
    return values


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("donate", [True, False], ids=["given away", "kept"])
def test_variables_have_the_values_and_train_on_from_them(donate: bool, aligned: bool):
    model, other = a_model(), a_model()
    x = np.random.default_rng(1).random((8, UNITS), dtype=np.float32)
    state = read_state(model)
    values = values_like(state, aligned=aligned)
    expected = {name: value.copy() for name, value in values.items()}
    load_snapshot(state, values, donate=donate)
    for name, value in views(state).items():
        assert value.tobytes() == expected[name].tobytes(), name
    load_snapshot(read_state(other), expected)
    for each in (model, other):
        each.train_on_batch(x, x)
    for name, value in views(state).items():
        assert value.tobytes() == views(read_state(other))[name].tobytes(), name
    assert not np.array_equal(view(model.trainable_variables[0]), expected["trainable/0"])
    if not donate:
        assert all(np.array_equal(value, expected[name]) for name, value in values.items())


def test_what_another_model_was_is_refused_before_anything_changes():
    state = read_state(a_model())
    before = {name: value.copy() for name, value in views(state).items()}
    values = values_like(state)
    values["trainable/1"] = values["trainable/1"][:-1]
    with pytest.raises(CheckpointError, match="trainable/1"):
        load_snapshot(state, values, donate=True)
    assert all(np.array_equal(value, before[name]) for name, value in views(state).items())


def test_arrays_begin_where_a_backend_takes_them_as_they_are():
    for shape, dtype in [((), "f4"), ((0, 3), "f8"), ((7,), "i1"), ((33, 5), "f2")]:
        array = aligned_empty(shape, np.dtype(dtype))
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.ctypes.data % ALIGNMENT == 0 or array.size == 0


def test_what_is_declared_or_found_leaves_the_default_groups():
    class Keeps(keras.layers.Layer):
        def build(self, shape):
            options = {"shape": (), "initializer": "zeros", "trainable": False}
            self.plain = self.add_weight(**options)
            self.added = self.add_weight(**options, aggregation="sum")
            self.first = self.add_weight(**options, aggregation="only_first_replica")

        def call(self, x):
            return x

    layer = Keeps()
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    state = read_state(model)
    grouped = regroup(state, {})
    assert [v is layer.plain for v in grouped.mean] == [True]
    assert [v is layer.first for v in grouped.first] == [True]
    assert [(v is layer.added, how) for v, how in grouped.combined] == [(True, Operation.SUM_OF_CHANGES)]
    found = regroup(state, {id(layer.plain): Operation.LARGEST})
    assert not found.mean
    assert {how for _, how in found.combined} == {Operation.SUM_OF_CHANGES, Operation.LARGEST}
    # Snapshots name variables as ever.
    assert [name for name, _ in state.named() if name.startswith(("mean", "first"))] == [
        "mean/0",
        "first/0",
        "first/1",
    ]
