"""Aligned arrays, and swapping pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.exchange import pages as module
from insitu.exchange.pages import ALIGNMENT, Pages, PageSwapper, aligned_empty
from insitu.exchange.plan.arithmetic import PAGE


@given(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(["float32", "int8", "float64"]))
def test_aligned_arrays_begin_at_the_alignment(shape: list[int], dtype: str) -> None:
    array = aligned_empty(shape, np.dtype(dtype))
    assert array.shape == tuple(shape) and array.dtype == dtype
    assert array.ctypes.data % ALIGNMENT == 0


@settings(deadline=None)
@given(st.integers(0, 600_000), st.integers(0, 2 * PAGE), st.booleans())
def test_contents_move_to_the_same_address(size: int, start: int, swappable: bool) -> None:
    pages, staging = Pages(start + size), Pages(size)
    array = pages.array()[start:]
    address = array.ctypes.data
    values = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    staging.array()[:] = values
    pages.array()[:start] = 7
    PageSwapper().move(staging, array, swappable)
    assert array.ctypes.data == address
    assert array.tobytes() == values.tobytes()
    assert (pages.array()[:start] == 7).all()


@pytest.mark.parametrize("huge", [True, False])
def test_pages_are_zeros_and_know_their_arrays(huge: bool) -> None:
    pages = Pages(10_000, huge=huge)
    assert not pages.array().any()
    assert pages.holds(pages.array()[5:])
    assert not pages.holds(np.zeros(5))


def test_only_whole_pages_of_the_machine_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of 64 KiB the kernel rounds lengths up: up to 60 KiB behind an array were swapped, too."""
    monkeypatch.setattr(module, "PAGE", 1 << 16)
    swapped: list[int] = []
    swapper = PageSwapper()
    monkeypatch.setattr(swapper, "_swap", lambda one, other, size: swapped.append(size) or False)
    staging, pages = Pages(1 << 20), Pages(1 << 20)
    swapper.move(staging, pages.array()[: (1 << 19) + 3 * 4096], True)
    assert swapped == [1 << 19]
    swapper.move(staging, pages.array()[4096 : (1 << 19) + 4096], True)  # doesn't begin on a page
    assert swapped == [1 << 19]
