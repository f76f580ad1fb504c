"""Files that are mapped into one range of addresses."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partition_rows import make_rows, write_rows

from insitu.base.errors import GridError
from insitu.base.spec import Column
from insitu.grid.partitions import Partition, address_space
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


@pytest.mark.parametrize(("call", "code"), [(1, errno.ENOMEM), (2, errno.ENOMEM), (2, errno.EMFILE)])
def test_limits_of_the_system_are_named(
    call: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = address_space._map, []

    def refuse(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    monkeypatch.setattr(address_space, "_map", refuse)
    with pytest.raises(GridError, match=r"Received: .*for 1 of them.*max_map_count.*fewer --partitions"):
        AddressSpace(make_files(tmp_path, [100]), [100], 8)


def test_a_partition_keeps_no_file_open(tmp_path: Path) -> None:
    columns = (Column("x", "int64"),)
    write_rows(tmp_path / "a", columns, make_rows(columns, 20), 20, 8)
    before = len(os.listdir("/proc/self/fd"))
    partition = Partition(tmp_path / "a", columns, 20, 8)
    assert len(os.listdir("/proc/self/fd")) == before and partition.values["x"].slice(3, 4).tolist()
