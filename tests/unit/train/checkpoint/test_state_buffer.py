"""A training's state in one piece of memory."""

from __future__ import annotations

import hashlib
import io
import mmap

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.serialization import Payload, encode
from insitu.train.checkpoint.state_buffer import StateBuffer, compute_offsets, read_arrays

DTYPES = ["float32", "float64", "int8", "bool", "uint16", ml_dtypes.bfloat16, "<U3"]
SIZES = st.lists(st.integers(0, 300), max_size=6)


def a_payload(sizes: list[int], seed: int = 0) -> Payload:
    rng = np.random.default_rng(seed)
    arrays = [
        (rng.random(size) * 100).astype(DTYPES[(seed + index) % len(DTYPES)])
        for index, size in enumerate(sizes)
    ]
    return encode([*arrays, np.array(3.5), np.zeros((2, 0, 3), "int32"), np.arange(12).reshape(3, 4).T])


def written(buffer: StateBuffer) -> bytes:
    return bytes(buffer.pages[: buffer.nbytes])


@given(SIZES, SIZES, st.integers(0, 6))
def test_what_it_takes_is_read_again_whatever_it_held_before(before: list[int], sizes: list[int], seed: int):
    buffer, payload = StateBuffer(), a_payload(sizes, seed)
    buffer.copy_from(a_payload(before, seed + 1))
    buffer.copy_from(payload)
    fresh = StateBuffer()
    fresh.copy_from(payload)
    assert written(buffer) == written(fresh)
    assert buffer.compute_digest() == hashlib.sha256(written(buffer)).hexdigest()
    arrays, digest = read_arrays(io.BytesIO(written(buffer)), payload.specs)
    assert digest == buffer.compute_digest()
    for array, taken in zip(arrays, payload.arrays, strict=True):
        assert array.dtype == taken.dtype and array.shape == taken.shape
        assert array.tobytes() == taken.tobytes()


def test_arrays_larger_than_a_slice_are_whole():
    array = np.random.default_rng(0).random(5 * (1 << 17) + 3)
    buffer = StateBuffer()
    buffer.copy_from(encode([array, array[:7]]))
    (large, small), _ = read_arrays(io.BytesIO(written(buffer)), encode([array, array[:7]]).specs)
    assert np.array_equal(large, array) and np.array_equal(small, array[:7])


def test_pages_are_whole_and_arrays_begin_where_processors_like_it():
    buffer = StateBuffer()
    buffer.copy_from(a_payload([3, 1000, 7]))
    assert np.frombuffer(buffer.pages, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    assert len(buffer.pages) % mmap.PAGESIZE == 0 and len(buffer.pages) >= buffer.nbytes
    begins, size = compute_offsets([["<f4", [3]], ["|i1", []], ["<f8", [0]], ["<f8", [9]]])
    assert (begins, size) == ([0, 64, 128, 128], 256)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"0", lambda data: b""])
def test_another_number_of_bytes_is_refused(change):
    payload = a_payload([10])
    buffer = StateBuffer()
    buffer.copy_from(payload)
    with pytest.raises(ValueError, match=r"arrays\.bin"):
        read_arrays(io.BytesIO(change(written(buffer))), payload.specs)


@pytest.mark.parametrize("shape", [[2**50], [2**62, 2**62], [-1], [2.5]])
def test_nothing_is_allocated_for_a_shape_that_the_file_doesnt_hold(shape):
    with pytest.raises((ValueError, TypeError), match=r"arrays\.bin|integer"):
        read_arrays(io.BytesIO(bytes(64)), [["<f4", shape]])
