"""Files that survive a power cut."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from insitu.base.disk import durable
from insitu.base.disk.durable import (
    published,
    recover_replaced,
    replace_file,
    staged_file,
    sync_tree,
    write_pages,
)


def pages(size: int) -> memoryview:
    memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory[:size] = np.random.default_rng(size).bytes(size)
    return memoryview(memory)


@pytest.mark.parametrize("size", [1, 4096, 5000, (1 << 20) - 1, (1 << 20) + 1, (33 << 20) + 17])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_file_has_the_bytes_and_no_more(tmp_path: Path, place: str, size: int):
    path = (tmp_path if place == "disk" else Path("/dev/shm")) / f"insitu-test-{os.getpid()}"
    if shutil.disk_usage(path.parent).free < 2 * size:
        pytest.skip(f"{path.parent} is too small")
    data = pages(size)
    try:
        write_pages(path, data, size)
        assert path.read_bytes() == data[:size]
    finally:
        path.unlink()


def test_a_file_system_that_cannot_go_past_its_cache_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write, flags_seen = os.write, []

    def picky(descriptor: int, data: memoryview) -> int:
        flags = durable.fcntl.fcntl(descriptor, durable.fcntl.F_GETFL)
        flags_seen.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data[: 3 << 20])

    monkeypatch.setattr(durable.os, "write", picky)
    data = pages(8 << 20)
    write_pages(tmp_path / "file", data, (8 << 20) - 5)
    assert (tmp_path / "file").read_bytes() == data[: (8 << 20) - 5]
    assert flags_seen == [True, False, False, False]


def test_what_goes_wrong_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write_pages(tmp_path / "file", pages(8), 8)


def test_a_folder_is_published_whole_or_not_at_all(tmp_path: Path):
    (tmp_path / ".staging-1").mkdir()
    for text in ("one", "two"):
        with durable.published(tmp_path, "name") as staging:
            assert not (tmp_path / ".staging-1").exists()
            durable.write_synced(staging / "file", text.encode())
        assert (tmp_path / "name" / "file").read_text() == text
    with pytest.raises(RuntimeError), durable.published(tmp_path, "name") as staging:
        durable.write_synced(staging / "file", b"three")
        raise RuntimeError
    assert (tmp_path / "name" / "file").read_text() == "two"
    assert os.listdir(tmp_path) == ["name"]


def test_a_sealed_state_that_was_changed_is_not_believed():
    sealed = durable.seal({"step": 12, "names": ["a"]})
    assert durable.unseal(sealed) == {"step": 12, "names": ["a"]}
    with pytest.raises(ValueError, match="checksum"):
        durable.unseal(sealed.replace(b"12", b"13"))


def test_a_file_is_written_piece_by_piece(tmp_path: Path):
    data = pages(3 << 20)
    file = durable.PageFile(tmp_path / "file", 3 << 20)
    for low in range(0, 3 << 20, 1 << 20):
        file.write(data[low : low + (1 << 20)])
    file.finish((3 << 20) - 100)
    file.close()
    assert (tmp_path / "file").read_bytes() == data[: (3 << 20) - 100]


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
):
    target = tmp_path / "file"
    replace_file(target, b"old", sync=sync)

    def full(staged: Path, new: Path) -> None:
        assert staged.read_bytes() == b"new" and target.read_bytes() == b"old"
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            replace_file(target, b"new", sync=sync)
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    replace_file(target, b"new", sync=sync)
    assert target.read_bytes() == b"new" and os.listdir(tmp_path) == ["file"]


def test_two_staged_files_of_one_target_do_not_meet(tmp_path: Path):
    with staged_file(tmp_path / "file") as one, staged_file(tmp_path / "file") as other:
        one.write_bytes(b"1")
        other.write_bytes(b"2")
        assert one.read_bytes() == b"1"
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("sync", [False, True])
def test_the_name_of_a_replaced_file_is_synced_behind_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
):
    found: list[bytes] = []
    monkeypatch.setattr(durable, "sync_folder", lambda folder: found.append((folder / "file").read_bytes()))
    replace_file(tmp_path / "file", b"new", sync=sync)
    assert found == [b"new"] * sync


def test_two_writers_of_one_process_do_not_meet(tmp_path: Path):
    """A fit that failed may still write a checkpoint while the next fit of the process begins."""
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    with durable.published(tmp_path / "real", "one") as first:
        with durable.published(tmp_path / "linked", "two") as second:
            assert first.exists()
            durable.write_synced(second / "file", b"2")
        durable.write_synced(first / "file", b"1")
    assert (tmp_path / "real" / "one" / "file").read_bytes() == b"1"
    assert (tmp_path / "real" / "two" / "file").read_bytes() == b"2"
    assert sorted(os.listdir(tmp_path / "real")) == ["one", "two"]


def test_what_a_process_of_the_same_number_left_is_removed(tmp_path: Path):
    left = [tmp_path / f".staging-{os.getpid()}{suffix}" for suffix in ("", *(f"-{n}" for n in range(99)))]
    for folder in left:
        folder.mkdir()
    with durable.published(tmp_path, "name") as staging:
        assert os.listdir(tmp_path) == [staging.name]


def put(folder: Path, text: str) -> None:
    with published(folder, "one") as staging:
        (staging / "file").write_text(text)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_that_is_replaced_is_there_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
):
    """Whoever kills the writer at any call that changes names finds the old folder or the new one."""
    if not can_exchange:
        monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
    folder = tmp_path / "folder"
    put(folder, "old")
    seen: list[str] = []
    looking: list[bool] = []

    def look(function):
        def wrapped(*args, **kwargs):
            done = function(*args, **kwargs)
            if not looking:
                looking.append(True)
                copy = tmp_path / f"killed-{len(seen)}"
                shutil.copytree(folder, copy)
                recover_replaced(copy)
                seen.append((copy / "one" / "file").read_text())
                looking.clear()
            return done

        return wrapped

    monkeypatch.setattr(Path, "rename", look(Path.rename))
    monkeypatch.setattr(durable, "_exchange", look(durable._exchange))
    monkeypatch.setattr(durable.shutil, "rmtree", look(shutil.rmtree))
    put(folder, "new")
    monkeypatch.undo()
    assert seen[-1] == "new" and set(seen) <= {"old", "new"} and len(seen) > 1
    assert [p.name for p in folder.iterdir()] == ["one"]
    assert (folder / "one" / "file").read_text() == "new"


def test_the_next_writer_recovers_what_was_put_aside(tmp_path: Path):
    put(tmp_path, "old")
    (tmp_path / "one").rename(tmp_path / ".replaced-one")
    with published(tmp_path, "two"):
        assert (tmp_path / "one" / "file").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("few", [True, False])
def test_every_file_of_a_tree_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool):
    if not few:
        monkeypatch.setattr(durable, "_SYNCED_ONE_BY_ONE", 1)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).touch()
    (tmp_path / "a" / "link").symlink_to("nowhere")
    synced, all_of_it = [], []
    monkeypatch.setattr(durable.os, "fsync", lambda d: synced.append(os.readlink(f"/proc/self/fd/{d}")))
    monkeypatch.setattr(durable, "_sync_file_system", all_of_it.append)
    sync_tree(tmp_path)
    names = [str(tmp_path / name) for name in ("", "x", "a", "a/y", "a/b", "a/b/z")]
    assert (sorted(synced), all_of_it) == (sorted(names), []) if few else ([], [tmp_path])
    monkeypatch.undo()
    sync_tree(tmp_path)
    durable._sync_file_system(tmp_path)
