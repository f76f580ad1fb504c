"""Sparse tables and the index of their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.errors import InputError, ParameterError
from insitu.parameters.arena import Arena
from insitu.parameters.growable_array import GrowableArray
from insitu.parameters.hashing import assign_servers
from insitu.parameters.key_index import KeyIndex
from insitu.parameters.tables import Eviction, RowStore, Table, sum_duplicates

keys64 = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60)


def pulled(rows: RowStore, keys: Any, **options: Any) -> Any:
    keys = np.asarray(keys, np.int64)
    out = np.empty((len(keys), rows.table.width), rows.table.dtype)
    rows.pull(keys, out, **options)
    return out


@settings(max_examples=50, deadline=None)
@given(st.lists(keys64, max_size=6))
def test_the_index_is_a_dictionary(batches):
    index, known = KeyIndex(limit=1 << 20), {}
    for batch in batches:
        found = index.find(np.array(batch, np.int64))
        assert found.tolist() == [known.get(key, -1) for key in batch]
        new = [key for key in dict.fromkeys(batch) if key not in known]
        known.update(zip(new, index.add(np.array(new, np.int64)).tolist(), strict=True))
    assert len(index) == len(known)


def test_many_keys_in_one_place_of_the_index():
    index = KeyIndex()
    keys = np.arange(5000, dtype=np.int64) << 40
    index.add(keys)
    assert index.find(keys).tolist() == list(range(5000))
    assert index.find(keys + 1).tolist() == [-1] * 5000
    index.rebuild()
    assert index.find(keys).tolist() == list(range(5000))


@pytest.mark.parametrize("initializer", ["uniform", "normal", {"name": "constant", "value": 2.5}])
def test_first_values_depend_on_nothing_but_seed_table_and_key(initializer):
    table = Table("t", 7, initializer=initializer, seed=5)
    one, two = RowStore(table), RowStore(table)
    keys = np.array([9, -3, 2**63 - 1, 9])
    a = pulled(one, keys)
    pulled(two, [1, 2, 3])
    b = np.concatenate([pulled(two, [key]) for key in keys])
    np.testing.assert_array_equal(a, b)
    if initializer != {"name": "constant", "value": 2.5}:
        assert (pulled(RowStore(Table("t", 7, initializer=initializer, seed=6)), keys) != a).all()
        assert (pulled(RowStore(Table("u", 7, initializer=initializer, seed=5)), keys) != a).all()


def test_drawn_values_have_the_moments_asked_for():
    keys = np.arange(20000)
    normal = pulled(RowStore(Table("t", 9, initializer={"name": "normal", "mean": 1, "deviation": 2})), keys)
    assert abs(normal.mean() - 1) < 0.03
    assert abs(normal.std() - 2) < 0.03
    uniform = pulled(RowStore(Table("t", 9, initializer={"name": "uniform", "low": -1, "high": 3})), keys)
    assert -1 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() <= 3
    assert abs(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1]) < 0.03


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
def test_rows_move_as_dense_variables_do(updater):
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


def test_the_number_of_rows_is_kept():
    rows = RowStore(Table("t", 2, eviction=Eviction(max_rows=10, every=1)))
    for key in range(50):
        rows.push(np.array([key]), np.ones((1, 2), "f4"))
    assert sorted(rows.arrays()["keys"].tolist()) == list(range(40, 50))


def test_a_copy_has_everything():
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


def test_a_table_that_does_not_fit_says_so():
    rows = RowStore(Table("t", 64), limit=1 << 16)
    with pytest.raises(ParameterError, match="spread the table over more servers"):
        pulled(rows, np.arange(1000))


def test_an_array_grows_where_it_lies():
    growing = GrowableArray((3,), np.dtype("f4"))
    growing.extend(10)
    growing.array[:10] = 7
    address = growing.array.__array_interface__["data"][0]
    growing.extend(1_000_000)
    assert growing.array.__array_interface__["data"][0] == address
    assert (growing.array[:10] == 7).all()


def test_keys_are_spread_evenly_over_servers():
    counts = np.bincount(assign_servers(np.arange(30_000), 3), minlength=3)
    assert counts.min() > 9_500


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
def test_tables_that_cannot_be(arguments, message):
    with pytest.raises(InputError, match=message):
        Table(**{"name": "t", "width": 4, **arguments})


def test_an_arena_lends_and_takes_back():
    arena = Arena(1 << 16)
    kind = np.dtype("f4")
    first, second = arena.allocate([((100,), kind), ((7, 3), kind)]), arena.allocate([((8000,), kind)])
    assert first is not None and second is not None
    assert [array.shape for array in first.arrays] == [(100,), (7, 3)]
    first.arrays[1][...] = 1
    second.arrays[0][...] = 2
    assert (first.arrays[1] == 1).all()
    assert arena.allocate([((10_000,), kind)]) is None
    first.free()
    second.free()
    assert arena.allocated_bytes == 0
    whole = arena.allocate([((1 << 14,), kind)])
    assert whole is not None
    whole.free()
    whole.free()
    assert arena.allocated_bytes == 0
    arena.close()


def test_what_the_arena_hands_out_comes_back_with_its_last_view():
    arena = Arena(1 << 12)
    kind = np.dtype("f4")
    allocation = arena.allocate([((8,), np.dtype("i8")), ((100,), kind)])
    assert allocation is not None
    handed = allocation.detach(1)
    allocation.free()
    handed[...] = 3
    view = handed.reshape(10, 10)[2:]
    del handed, allocation
    assert arena.allocated_bytes == 512
    assert arena.allocate([((900,), kind)]) is None
    assert (view == 3).all()
    del view
    assert arena.allocated_bytes == 0
    allocation = arena.allocate([((1000,), kind)])
    assert allocation is not None
    copy = allocation.detach(0)  # most of it is lent
    allocation.free()
    assert arena.allocated_bytes == 0
    assert copy.shape == (1000,)
    arena.close()
