"""Writes that the disk isn't far behind of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from insitu.grid.partitions import writer
from insitu.grid.partitions.writer import WritePacing


@pytest.mark.parametrize("drop", [False, True])
def test_what_is_far_behind_is_waited_for_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: bool
) -> None:
    monkeypatch.setattr(writer, "_BEHIND_BYTES", 3000)
    dropped: list[tuple[int, int]] = []

    def advise(_: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    paced = WritePacing(drop=drop)
    path = tmp_path / "file"
    with path.open("wb") as file:
        for number in range(6):
            file.write(bytes(1000))
            file.flush()
            paced.add(path, file.fileno(), 1000 * number, 1000)
    assert dropped == ([(0, 1000), (1000, 1000), (2000, 1000)] if drop else [])
    assert path.read_bytes() == bytes(6000)


def test_a_file_that_is_gone_is_passed_over(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "_BEHIND_BYTES", 0)
    path = tmp_path / "file"
    with path.open("wb") as file:
        path.unlink()
        WritePacing(drop=True).add(path, file.fileno(), 0, 1000)
