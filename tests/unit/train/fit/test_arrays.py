"""Arrays: which rows a batch has, and in which order."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.errors import InputError
from insitu.train.fit.arrays import ArraySource, DrawnOrder, count_fit_of, default_batch_size, to_rows


def order_of(epoch: int = 0, *, seed: int = 3, fit: int = 0, script_seed: int = 0) -> list[int]:
    source = ArraySource((np.arange(40),), 40, True, DrawnOrder(seed, fit, script_seed))
    return next(source.batches(epoch))[0].tolist()


def test_the_order_of_an_epoch_is_pinned():
    # Runs are compared across versions, so that the order may not change by accident.
    source = ArraySource((np.arange(8),), 8, True, DrawnOrder(3, 0, 0))
    assert next(source.batches(0))[0].tolist() == [1, 0, 2, 5, 4, 3, 7, 6]


def test_each_epoch_fit_and_seed_has_an_order_of_its_own():
    orders = [order_of(), order_of(1), order_of(fit=1), order_of(seed=4), order_of(script_seed=1)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert order_of(2, fit=3) == order_of(2, fit=3)


def test_the_seed_of_keras_reaches_the_order():
    keras.utils.set_random_seed(5)
    first = DrawnOrder()
    keras.utils.set_random_seed(6)
    assert first.numbers != DrawnOrder().numbers
    keras.utils.set_random_seed(5)
    assert first.numbers == DrawnOrder().numbers


@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from([False, True, "batch"]), st.integers(0, 5))
def test_an_epoch_is_entered_in_its_middle(rows, batch, shuffle, start):
    source = ArraySource((np.arange(rows), -np.arange(rows)), batch, shuffle, DrawnOrder(1))
    whole = list(source.batches(2))
    assert len(whole) == source.num_steps
    assert sorted(row for x, _ in whole for row in x.tolist()) == list(range(rows))
    for (x, y), (other, _) in zip(whole[start:], source.batches(2, start), strict=True):
        assert x.tolist() == other.tolist() == (-y).tolist()


def test_a_shuffle_of_batches_leaves_rows_in_their_batch():
    source = ArraySource((np.arange(23),), 8, "batch", DrawnOrder(1))
    batches = [x.tolist() for (x,) in source.batches(0)]
    assert [sorted(batch) for batch in batches] == [list(range(8)), list(range(8, 16)), list(range(16, 23))]
    assert batches[0] != sorted(batches[0])


def test_arrays_become_what_keras_makes_of_them():
    rows = to_rows({"a": np.arange(3, dtype="float64"), "b": np.arange(3), "c": None})
    assert rows["a"].dtype == "float32" and rows["b"].dtype == np.arange(3).dtype and rows["c"] is None
    same = np.zeros((3, 2), "float32")
    assert to_rows(same) is same


def test_sparse_arrays_are_dense_in_a_batch():
    from scipy import sparse

    dense = np.array([[0, 1], [2, 0], [0, 3]], "float32")
    source = ArraySource((to_rows(sparse.coo_matrix(dense)),), 2, True, DrawnOrder(1))
    (first,), (second,) = source.batches(0)
    assert sorted(np.concatenate([first, second]).tolist()) == sorted(dense.tolist())
    assert type(first) is np.ndarray


def test_tensors_of_tensorflow_are_rows_too():
    import tensorflow as tf

    assert to_rows(tf.constant([1.0, 2.0])).tolist() == [1, 2]
    assert to_rows(tf.constant(["a", "b"])).tolist() == [b"a", b"b"]
    sparse = to_rows(tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0]]))
    (batch,) = ArraySource((sparse,), 2).batches(0)
    assert batch[0].tolist() == [[0, 1], [2, 0]]
    with pytest.raises(InputError, match=r"RaggedTensor\. Convert it with to_tensor"):
        to_rows(tf.ragged.constant([[1], [2, 3]]))


def test_the_size_of_a_batch_follows_from_steps_as_in_keras():
    assert [default_batch_size(10, 3), default_batch_size(10, None)] == [4, 32]


def test_fits_of_a_model_are_counted():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert [count_fit_of(model) for _ in range(3)] == [0, 1, 2]
