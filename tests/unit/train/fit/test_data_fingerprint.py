"""Fingerprints tell data apart that differ, and only those."""

from __future__ import annotations

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.train.fit import data_fingerprint
from insitu.train.fit.data_fingerprint import check_same_data, fingerprint_arrays, fingerprint_batch


def images(rows: int = 200) -> np.ndarray:
    """Pictures with a black border."""
    pixels = np.zeros((rows, 28, 28), "float32")
    pixels[:, 6:22, 6:22] = np.random.default_rng(1).uniform(size=(rows, 16, 16))
    return pixels


@pytest.mark.parametrize("rows", [4, 200])
def test_a_batch_in_another_order_has_another_fingerprint(rows):
    batch = images(rows)
    number = fingerprint_batch((batch,))
    assert 0 < number < 2**52
    assert number == fingerprint_batch((batch.copy(),)) == fingerprint_batch((np.asfortranarray(batch),))
    swapped = batch.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert fingerprint_batch((batch[::-1],)) != number
    assert rows > 4 or fingerprint_batch((swapped,)) != number
    assert fingerprint_batch((batch[1:],)) != number


def test_texts_and_structures_have_fingerprints():
    words = np.array(["a", "b"], object)
    assert fingerprint_batch({"x": words}) != fingerprint_batch({"x": words[::-1]})
    assert fingerprint_batch(({"a": np.ones(2), "b": None},)) == fingerprint_batch((np.ones(2),))


@pytest.mark.parametrize("limit", [1 << 30, 4096])
def test_arrays_in_another_order_have_another_fingerprint(limit, monkeypatch):
    monkeypatch.setattr(data_fingerprint, "ARRAY_BYTES", limit)
    x, y = images(), np.arange(200)
    number = fingerprint_arrays([x, y], (8, 1))
    assert number == fingerprint_arrays([x.copy(), y.copy()], (8, 1))
    order = np.random.default_rng(2).permutation(200)
    others = [([x[order], y[order]], (8, 1)), ([x, y], (8, 2)), ([x[:-1], y[:-1]], (8, 1))]
    assert all(fingerprint_arrays(*other) != number for other in others)


def test_different_data_is_an_error_that_names_the_shards():
    check_same_data([3.0, 3.0, 3.0], "step 4")
    with pytest.raises(InputError, match=r"at step 4, the process of shard 1, 2 has another batch"):
        check_same_data([3.0, 4.0, 5.0], "step 4")
