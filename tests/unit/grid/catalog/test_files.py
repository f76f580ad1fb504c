"""Locks and atomic publishing."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from insitu.base.disk import durable
from insitu.base.errors import CacheBusy, GridError, StorageFull
from insitu.base.paths import Paths
from insitu.grid.catalog import files


def test_a_lock_held_for_an_instant_is_waited_for(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = paths.cache_lock("a")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waits = []

        def release(seconds: float) -> None:
            waits.append(seconds)
            fcntl.flock(holder, fcntl.LOCK_UN)

        monkeypatch.setattr(files.time, "sleep", release)
        with files.cache_locks(paths, ["a"]):
            assert len(waits) == 1


def test_locks_are_given_back_when_one_of_them_is_busy(paths: Paths) -> None:
    lock = paths.cache_lock("b")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(CacheBusy, match="into b"), files.cache_locks(paths, ["b", "a"]):
            pass
        with files.cache_locks(paths, ["a"]):
            pass


def test_publishing_replaces_as_a_whole_and_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    assert files.publish_first(target, b"one") and not files.publish_first(target, b"two")
    assert target.read_bytes() == b"one"
    files.publish_file(target, b"three")
    assert target.read_bytes() == b"three" and os.listdir(target.parent) == ["file"]


def test_a_full_disk_leaves_nothing_and_the_old_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    files.publish_file(target, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(durable.os, "fsync", full)
    for publish in (files.publish_file, files.publish_first):
        with pytest.raises(StorageFull):
            publish(target, b"new")
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_only_a_full_disk_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(StorageFull), files.full_disk_as_error(tmp_path):
        raise OSError(errno.ENOSPC, "full")
    words = rf"disk must take what is written to {tmp_path}.*system's log"
    with pytest.raises(GridError, match=words), files.full_disk_as_error(tmp_path):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(PermissionError), files.full_disk_as_error(tmp_path):
        raise PermissionError(errno.EACCES, "no")
