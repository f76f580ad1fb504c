"""What is particular to `.npz`; `test_sources.py` has what all formats do."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.npz import NpzSource


def test_each_array_is_a_column(tmp_path: Path):
    x = np.asfortranarray(np.arange(20.0).reshape(10, 2))
    np.savez_compressed(tmp_path / "a.npz", x=x, label=np.arange(10), name=np.array(["é", "b"] * 5))
    source = NpzSource(tmp_path / "a.npz", SourceOptions())
    assert source.columns == (Column("x", "float64", (2,)), Column("label", "int64"), Column("name", "str"))
    blocks = [(b.rows, np.array(b.columns["x"]), b.columns["name"].to_pylist()) for b in source.blocks(100)]
    assert len(blocks) > 1 and sum(rows for rows, *_ in blocks) == 10
    np.testing.assert_array_equal(np.concatenate([values for _, values, _ in blocks]), x)
    assert [name for *_, names in blocks for name in names] == ["é", "b"] * 5


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_two_arrays_are_read_side_by_side(tmp_path: Path, save: Callable[..., None]):
    x, y = np.arange(100_000.0).reshape(-1, 2), np.arange(50_000)
    save(tmp_path / "a.npz", x=x, y=y)
    blocks = list(NpzSource(tmp_path / "a.npz", SourceOptions()).blocks(10_000))
    np.testing.assert_array_equal(np.concatenate([block.columns["x"] for block in blocks]), x)
    np.testing.assert_array_equal(np.concatenate([block.columns["y"] for block in blocks]), y)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_wrong_checksum_is_noticed(tmp_path: Path, save: Callable[..., None]):
    path = tmp_path / "a.npz"
    save(path, x=np.arange(1000))
    with zipfile.ZipFile(path) as archive:
        checksum = archive.infolist()[0].CRC
    wrong = path.read_bytes().replace(checksum.to_bytes(4, "little"), (checksum ^ 1).to_bytes(4, "little"))
    path.write_bytes(wrong)
    source = NpzSource(path, SourceOptions())
    with pytest.raises(SourceError, match=r"is no whole \.npz file"):
        list(source.blocks(1 << 20))


def test_arrays_of_different_length_are_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(SourceError, match="Received: x has 3, y has 4"):
        NpzSource(tmp_path / "a.npz", SourceOptions())


def test_an_archive_without_arrays_is_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz")
    with pytest.raises(SourceError, match="holds no arrays"):
        NpzSource(tmp_path / "a.npz", SourceOptions())
