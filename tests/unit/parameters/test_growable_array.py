"""Arrays that grow."""

from __future__ import annotations

import numpy as np

from insitu.parameters.growable_array import GrowableArray


def test_an_array_grows_without_moving():
    growing = GrowableArray((3,), np.dtype("f4"))
    growing.extend(10)
    growing.array[:10] = 7
    address = growing.array.__array_interface__["data"][0]
    growing.extend(1_000_000)
    assert growing.array.__array_interface__["data"][0] == address
    assert (growing.array[:10] == 7).all()
