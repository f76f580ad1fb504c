"""Sparse tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import InputError, ParameterError
from insitu.parameters.tables import Eviction, RowStore, Table, sum_duplicates

keys64 = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60)


def pulled(rows: RowStore, keys: Any, **options: Any) -> Any:
    keys = np.asarray(keys, np.int64)
    out = np.empty((len(keys), rows.table.width), rows.table.dtype)
    rows.pull(keys, out, **options)
    return out


@settings(max_examples=50, deadline=None)
@given(keys64, st.integers(0, 100))
def test_equal_keys_are_added_up(keys, seed):
    keys = np.array([key % 7 for key in keys], np.int64)
    rows = np.random.default_rng(seed).integers(-9, 9, (len(keys), 3)).astype("f4")
    distinct, sums = sum_duplicates(keys, rows)
    assert distinct.tolist() == sorted(set(keys.tolist()))
    for key, total in zip(distinct, sums, strict=True):
        np.testing.assert_array_equal(total, rows[keys == key].sum(0))


@pytest.mark.parametrize("updater", ["sgd", "adam", "adagrad", "ftrl", {"name": "sgd", "momentum": 0.9}])
def test_rows_are_updated_as_dense_variables_are(updater):
    from insitu.parameters.updaters import make_updater

    rows = RowStore(Table("t", 4, updater=updater))
    keys = np.arange(1000)
    dense = pulled(rows, keys)
    made = make_updater(updater)
    slots = made.slots("t", dense.shape, dense.dtype)
    rng = np.random.default_rng(0)
    for step in range(3):
        gradient = rng.normal(size=dense.shape).astype("f4")
        order = rng.permutation(len(keys))
        rows.push(keys[order], gradient[order])
        made.update({"t": dense}, {"t": gradient}, {"t": slots}, step)
    np.testing.assert_array_equal(pulled(rows, keys), dense)


def test_old_and_rare_rows_are_evicted_and_start_over():
    eviction = Eviction(max_age=3, min_count=3, every=1)
    rows = RowStore(Table("t", 2, updater={"name": "sgd", "learning_rate": 1.0}, eviction=eviction))
    first = pulled(rows, [1, 2])
    one = np.ones((1, 2), "f4")
    for _ in range(3):
        rows.push(np.array([1]), one)
    rows.push(np.array([2]), one)
    for _ in range(5):
        rows.push(np.array([3]), one)
    assert sorted(rows.arrays()["keys"].tolist()) == [1, 3]
    assert rows.evicted == 2  # once before its only gradient, once after
    np.testing.assert_array_equal(pulled(rows, [2]), first[1:])
    np.testing.assert_allclose(pulled(rows, [1]), first[:1] - 3)


def test_max_rows_bounds_the_table():
    rows = RowStore(Table("t", 2, eviction=Eviction(max_rows=10, every=1)))
    for key in range(50):
        rows.push(np.array([key]), np.ones((1, 2), "f4"))
    assert sorted(rows.arrays()["keys"].tolist()) == list(range(40, 50))


def test_a_loaded_copy_has_everything():
    table = Table("t", 3, updater="adam", eviction=Eviction(max_rows=100))
    rows, copy = RowStore(table), RowStore(table)
    rng = np.random.default_rng(0)
    for _ in range(5):
        keys = np.unique(rng.integers(0, 50, 20))
        rows.push(keys, rng.normal(size=(len(keys), 3)).astype("f4"))
    copy.load({name: array.copy() for name, array in rows.arrays().items()}, updates=rows.updates)
    keys = np.arange(50)
    gradient = rng.normal(size=(50, 3)).astype("f4")
    for each in (rows, copy):
        each.push(keys, gradient)
    np.testing.assert_array_equal(pulled(rows, keys), pulled(copy, keys))


def test_memory_for_each_row_is_little_more_than_what_it_holds():
    for updater, slots in (("sgd", 0), ("adam", 2)):
        rows = RowStore(Table("t", 64, updater=updater))
        for start in range(0, 100_000, 10_000):
            pulled(rows, np.arange(start, start + 10_000) * 977)
        assert rows.nbytes / len(rows) <= 1.3 * (64 * 4 * (1 + slots) + 8)


def test_a_table_that_does_not_fit_in_memory_fails():
    rows = RowStore(Table("t", 64), limit=1 << 16)
    with pytest.raises(ParameterError, match="spread the table over more servers"):
        pulled(rows, np.arange(1000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "1 to"),
        ({"dtype": "bfloat16"}, "float32, float64 or float16"),
        ({"initializer": "zeros"}, "initializer is one of"),
        ({"initializer": {"name": "uniform", "mean": 1}}, "takes low, high. Received: mean"),
        ({"updater": "lion"}, "updater is one of"),
        ({"updater": {"name": "sgd", "beta": 1}}, "doesn't take these settings"),
    ],
)
def test_bad_definitions_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Table(**{"name": "t", "width": 4, **arguments})
