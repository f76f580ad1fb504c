"""Which files are read whole before training, and which are taken to be as they were."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from insitu.base.context import Context
from insitu.base.errors import CorruptPartition, UnreadablePartition
from insitu.base.paths import Paths
from insitu.grid import Catalog, dataset, import_cache, verify_copies
from insitu.grid.partitions import verification

PARTITIONS = 3


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once, so that no test waits for the clock of file times."""
    monkeypatch.setattr(verification, "TIMESTAMP_TOLERANCE_NS", 0)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that have been read whole."""
    files: list[Path] = []
    checksum = verification.file_checksum
    monkeypatch.setattr(
        verification, "file_checksum", lambda path, *rest: (files.append(path), checksum(path))[1]
    )
    return files


@pytest.fixture
def verify(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Verifies the files once, as a new process would."""

    def run() -> None:
        monkeypatch.setattr(verification, "_verified", {})
        verify_all(paths)

    return run


def verify_all(paths: Paths) -> None:
    for info in Catalog(paths).get("a").partitions:
        place = ("node-0", "a", 1, info.index)
        verification.verify_once(paths.partition(*place), info, paths.verified(*place))


@pytest.fixture
def imported(paths: Paths, tmp_path: Path) -> list[Path]:
    """The partition files of a cache."""
    np.save(tmp_path / "a.npy", np.arange(3000))
    import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=PARTITIONS)
    return [paths.partition("node-0", "a", 1, index) for index in range(PARTITIONS)]


def record(path: Path) -> Path:
    return path.with_suffix(".verified")


def forget(files: list[Path]) -> None:
    for file in files:
        record(file).unlink()


def flip_unnoticed(path: Path) -> None:
    """Changes a value, but neither size, time of change, inode nor device."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_what_import_wrote_is_not_read_again(
    imported: list[Path], read: list[Path], verify: Callable[[], None]
) -> None:
    verify()
    assert read == []


def test_the_first_verification_spares_all_later_ones(
    imported: list[Path], read: list[Path], verify: Callable[[], None]
) -> None:
    forget(imported)
    verify()
    assert sorted(read) == imported
    verify()
    assert len(read) == PARTITIONS


def test_a_file_is_read_once_per_process_without_any_record(
    imported: list[Path], read: list[Path], paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(imported)
    monkeypatch.setattr(verification, "TIMESTAMP_TOLERANCE_NS", 1 << 62)
    for _ in range(2):
        verify_all(paths)
    assert len(read) == PARTITIONS and not any(record(file).exists() for file in imported)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def copy_anew(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def other_device(path: Path) -> None:
    record(path).write_text(json.dumps({**json.loads(record(path).read_text()), "device": -1}))


def other_checksum(path: Path) -> None:
    record(path).write_text(json.dumps({**json.loads(record(path).read_text()), "checksum": "crc32:0"}))


def break_the_record(path: Path) -> None:
    record(path).write_bytes(b"\xff{")


@pytest.mark.parametrize("change", [touch, copy_anew, other_device, other_checksum, break_the_record])
def test_a_changed_file_is_read_again(
    change: Callable[[Path], None], imported: list[Path], read: list[Path], verify: Callable[[], None]
) -> None:
    change(imported[1])
    for _ in range(2):
        verify()
    assert read == [imported[1]]


def test_a_file_that_changes_while_it_is_read_is_not_recorded(
    imported: list[Path], verify: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(imported)
    checksum = verification.file_checksum
    monkeypatch.setattr(verification, "file_checksum", lambda path, *rest: (checksum(path), touch(path))[0])
    verify()
    assert not any(record(file).exists() for file in imported)


def test_a_change_that_size_and_time_do_not_show_is_found_by_who_reads_and_by_describe_verify(
    paths: Paths, imported: list[Path], verify: Callable[[], None], alone: Context
) -> None:
    flip_unnoticed(imported[1])
    verify()
    with pytest.raises(CorruptPartition, match="column 'x' of its block 0 is damaged"):
        list(dataset("a", context=alone).batch(100))
    problems = [problem for _, _, problem in verify_copies(paths, Catalog(paths).get("a"))]
    assert [type(problem) for problem in problems] == [type(None), CorruptPartition, type(None)]
    with pytest.raises(CorruptPartition, match="its checksum is"):
        verify()


def test_describe_verify_reads_every_file_each_time(
    paths: Paths, imported: list[Path], read: list[Path]
) -> None:
    for _ in range(2):
        assert not any(problem for *_, problem in verify_copies(paths, Catalog(paths).get("a")))
    assert sorted(read) == sorted(imported * 2)


def test_a_store_that_cannot_be_written_to_is_read_all_the_same(
    imported: list[Path], read: list[Path], verify: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, mode: int) -> None:
        raise PermissionError(13, "Permission denied")

    forget(imported)
    monkeypatch.setattr(verification, "replace_file", refuse)
    for _ in range(2):
        verify()
    assert len(read) == 2 * PARTITIONS


def test_a_file_that_the_system_cannot_read_is_told_from_a_damaged_one(
    imported: list[Path], verify: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, *rest: object) -> str:
        raise OSError(5, "Input/output error")

    forget(imported)
    monkeypatch.setattr(verification, "file_checksum", fail)
    with pytest.raises(UnreadablePartition, match=r"can't be read .Input/output error"):
        verify()
    imported[0].unlink()
    imported[0].symlink_to("/not/mounted")
    with pytest.raises(UnreadablePartition, match="second path"):
        verify()
    imported[0].unlink()
    with pytest.raises(CorruptPartition, match="can't be found") as caught:
        verify()
    assert not isinstance(caught.value, UnreadablePartition)
