"""Compiled loops have the bits of NumPy's, and find each value that isn't finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy_reference import parameters_in_numpy

from insitu.parameters import Table, make_updater, native
from insitu.parameters.tables import RowStore

SIZES = [0, 1, 15, 16, 2048, 5000, (1 << 18) + 37]
"""Below, at and above a block, and large enough to be written past the caches."""


@pytest.fixture(params=[True, False], ids=["compiled", "NumPy"])
def compiled(request: Any) -> Iterator[bool]:
    """Whether there is compiled code."""
    with contextlib.nullcontext() if request.param else parameters_in_numpy():
        yield request.param


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
def test_a_copy_equals_its_source(compiled: bool, size: int, offset: int):
    source = np.random.default_rng(size).normal(size=size + 2).astype("f4")
    target = np.zeros(size + 2, "f4")
    assert native.copy_and_check(target[offset : offset + size], source[1 : 1 + size])
    np.testing.assert_array_equal(target[offset : offset + size], source[1 : 1 + size])
    assert not target[:offset].any() and not target[offset + size :].any()


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_at_each_position(compiled: bool, dtype: str, bad: float):
    values = np.full(5000, np.finfo(dtype).max, dtype)
    values[1::2] = np.finfo(dtype).smallest_subnormal
    target = np.empty_like(values)
    assert native.all_finite(values) and native.copy_and_check(target, values)
    for place in (0, 2047, 2048, 4999):
        kept, values[place] = values[place], bad
        assert not native.all_finite(values)
        assert not native.copy_and_check(target, values)
        np.testing.assert_array_equal(target, values)
        values[place] = kept


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    "config",
    [
        {"name": "sgd", "learning_rate": 0.1},
        {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
        {"name": "sgd", "learning_rate": 0.1, "clip_value": 0.5},
        {"name": "adam"},
        {"name": "ftrl"},
    ],
    ids=str,
)
def test_updates_are_copied_and_have_numpy_s_bits(
    compiled: bool, size: int, dtype: str, config: dict[str, Any]
):
    rng = np.random.default_rng(size)
    first, gradient = (rng.normal(size=size).astype(dtype) for _ in range(2))
    results = []
    for sweeps in (True, False):
        updater, values, copy = make_updater(config), first.copy(), np.zeros_like(first)
        slots = updater.slots("v", values.shape, values.dtype)
        with mock.patch.object(native, "update_sgd", native.update_sgd if sweeps else lambda *_: False):
            for step in range(3):
                updater.update({"v": values}, {"v": gradient}, {"v": slots}, step, {"v": copy})
        np.testing.assert_array_equal(copy, values)
        results.append(values)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("updater", ["sgd", "adam", "adagrad", {"name": "sgd", "momentum": 0.5}], ids=str)
def test_rows_of_tables_have_the_same_bits(dtype: str, updater: Any):
    rng = np.random.default_rng(3)
    batches = [np.unique(rng.integers(-(2**62), 2**62, 300) // 2**53 * 2**53 + 1) for _ in range(6)]
    pulled: list[list[Any]] = []
    for reference in (contextlib.nullcontext, parameters_in_numpy):
        with reference():
            rows, seen = RowStore(Table("t", 5, dtype=dtype, updater=updater)), []
            for keys in batches:
                rows.push(keys, (keys[:, None] // 2**53 % [3, 5, 7, 11, 13]).astype(dtype))
                for create in (False, True):
                    out = np.zeros((len(batches[0]), 5), dtype)
                    rows.pull(batches[0][::-1].copy(), out, create=create)
                    seen.append(out)
            seen += [rows.index.find(np.arange(-500, 500)), *rows.arrays().values()]
            pulled.append(seen)
    for mine, theirs in zip(*pulled, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_view_of_one_row_is_taken_and_put_whole():
    """Its first stride may be anything although it is contiguous: compiled code took it for the row's
    length."""
    rows, numbers = np.arange(24, dtype=np.float32).reshape(3, 8), np.array([1], np.int32)
    wide = np.zeros((4, 40), np.float32)
    one = np.lib.stride_tricks.as_strided(wide[1, :8], (1, 8), (160, 4))
    assert one.flags.c_contiguous and one.strides[0] == 160
    native.take(rows, numbers, one)
    np.testing.assert_array_equal(one, rows[1:2])
    assert not wide[2:].any() and not wide[1, 8:].any()
    one[:] = 7
    native.put(rows, numbers, one)
    assert (rows[1] == 7).all() and rows[2, 0] == 16


def test_rows_that_are_not_contiguous_are_refused():
    """Compiled code would write past each row."""
    rows, numbers = np.zeros((3, 8), np.float32), np.array([1], np.int32)
    for function in (native.take, native.put):
        with pytest.raises(ValueError, match="contiguous"):
            function(rows, numbers, np.zeros((1, 16), np.float32)[:, ::2])


def test_keys_that_are_not_contiguous_are_found():
    rows = RowStore(Table("t", 2))
    rows.push(np.arange(50), np.ones((50, 2), "f4"))
    assert rows.index.find(np.arange(60)[::-2]).tolist() == [-1] * 5 + list(range(49, 0, -2))
