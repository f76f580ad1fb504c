"""Files that are mapped into one range of addresses."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from insitu.grid.partitions.address_space import AddressSpace


def make_files(folder: Path, sizes: list[int]) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [folder / str(number) for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(rng.integers(0, 255, size, dtype=np.uint8).tobytes())
    return paths


@pytest.mark.parametrize("alignment", [8, 784, 4096, 8000])
def test_each_file_is_a_multiple_of_the_alignment_after_the_first(alignment: int, tmp_path: Path) -> None:
    sizes = [1, 5000, mmap.PAGESIZE, 100_000]
    paths = make_files(tmp_path, sizes)
    space = AddressSpace(paths, sizes, alignment)
    space.prefault()
    for path, size, offset in zip(paths, sizes, space.offsets.tolist(), strict=True):
        assert offset % alignment == 0
        assert space.memory[offset : offset + size].tobytes() == path.read_bytes()
    assert not space.memory.flags.writeable


def test_it_lives_as_long_as_a_view_and_no_longer(tmp_path: Path) -> None:
    (path,) = make_files(tmp_path, [10_000])
    view = AddressSpace([path], [10_000], 8).memory[5000:6000]
    gc.collect()
    assert view.tobytes() == path.read_bytes()[5000:6000] and str(path) in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_is_shorter_than_it_should_be_is_refused(tmp_path: Path) -> None:
    (path,) = make_files(tmp_path, [100])
    with pytest.raises(OSError, match="less than 101 bytes"):
        AddressSpace([path], [101], 8)
    assert str(path) not in Path("/proc/self/maps").read_text()
