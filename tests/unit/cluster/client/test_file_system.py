"""`insitu://` by fsspec, in the stores of one machine."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from insitu.base.disk import access
from insitu.base.errors import ClusterError, GridError, InputError
from insitu.base.paths import Paths
from insitu.cluster.client import open_files
from insitu.cluster.client.file_system import InsituFileSystem
from insitu.grid import bring_up, list_local_nodes, set_file_memory, take_down
from insitu.grid.shared_files import BLOCK_BYTES, blocks, open_local_names


@pytest.fixture
def paths(home: Path) -> Paths:
    paths = Paths(home)
    bring_up(paths, 3)
    return paths


@pytest.fixture
def system(paths: Paths) -> InsituFileSystem:
    return InsituFileSystem(skip_instance_cache=True)


def test_fsspec_finds_it_and_files_come_back(system: InsituFileSystem) -> None:
    assert fsspec.get_filesystem_class("insitu") is InsituFileSystem
    data = random.Random(1).randbytes(2 * BLOCK_BYTES + 12345)
    with fsspec.open("insitu://v/a/big", "wb") as file:
        for start in range(0, len(data), 1_000_003):
            file.write(data[start : start + 1_000_003])
    assert system.cat("v/a/big") == data and system.info("insitu://v/a/big")["blocks"] == 3
    assert system.cat_file("v/a/big", BLOCK_BYTES - 2, BLOCK_BYTES + 2) == data[BLOCK_BYTES - 2 :][:4]
    with system.open("v/a/big") as file:
        file.seek(-5, 2)
        assert file.read() == data[-5:]
        file.seek(BLOCK_BYTES - 10)
        assert file.read(20) == data[BLOCK_BYTES - 10 :][:20]
    with fsspec.open("insitu://v/text", "w", encoding="utf-8", newline="") as file:
        file.write("ä\r\n")
    assert system.cat("v/text") == "ä\r\n".encode() and system.read_text("v/text", newline="") == "ä\r\n"
    assert list(system.count_blocks("v/text").values()) == [1, 1]
    system.touch("v/empty")
    assert system.cat("v/empty") == b"" and system.size("v/empty") == 0
    assert abs(system.modified("v/text").timestamp() - system.info("v/text")["mtime"]) < 0.001


def test_a_path_is_not_called_away_because_nobody_could_tell(
    system: InsituFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.pipe_file("v/folder/a", b"1")
    asked = (system.exists, system.isdir, system.isfile)
    assert [ask("v/folder/a") for ask in asked] == [True, False, True]
    assert [ask("v/folder") for ask in asked] == [True, True, False]
    assert [ask("v/none") for ask in asked] == [False, False, False]

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no node answers")

    monkeypatch.setattr(system.client, "look", fail)
    for ask in asked:
        with pytest.raises(OSError, match="no node answers"):
            ask("v/folder/a")


@pytest.mark.parametrize("mode", ["wb", "w", "xb", "ab"])
def test_nobody_sees_half_a_file(
    system: InsituFileSystem, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "v/new" if mode == "xb" else "v/x"
    system.pipe("v/x", b"before")
    held = set(list_blocks())
    monkeypatch.setattr(open_files, "BLOCK_BYTES", 100)
    with pytest.raises(ZeroDivisionError), system.open(name, mode) as file:
        file.write(b"y" * 1000 if "b" in mode else "y" * 1000)
        assert system.cat("v/x") == b"before"
        raise ZeroDivisionError
    forgotten = system.open("v/y", "wb")
    forgotten.write(b"half")
    del forgotten
    assert system.cat("v/x") == b"before" and system.find("v") == ["v/x"]
    later = SimpleNamespace(time=lambda: time.time() + 4000, monotonic=lambda: time.monotonic() + 4000)
    monkeypatch.setattr(blocks, "time", later)
    system.repair("v")  # removes what nobody has published for an hour
    assert set(list_blocks()) == held


def test_a_file_that_is_written_for_long_is_kept_or_refused(
    system: InsituFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an hour its first blocks were removed, and closing it published what couldn't be read."""
    monkeypatch.setattr(open_files, "BLOCK_BYTES", 100)
    now = [0.0]
    monkeypatch.setattr(open_files, "time", SimpleNamespace(monotonic=lambda: now[0]))
    system.pipe("v/x", b"before")
    with system.open("v/x", "wb") as file:
        for _ in range(8):
            file.write(b"y" * 100)
            for path in list_blocks():
                os.utime(path, (1.0, 1.0))
            now[0] += 601.0
        file.write(b"z" * 100)
        assert sum(os.stat(path).st_mtime > 1.0 for path in list_blocks()) == 2 * 9
    assert system.cat("v/x") == b"y" * 800 + b"z" * 100
    lost = system.open("v/x", "wb")
    lost.write(b"a" * 100)
    for path in set(list_blocks()):
        Path(path).unlink()
    now[0] += 6.0
    with pytest.raises(OSError, match=r"1 of 1 blocks .* Nothing is published"):
        lost.close()
    assert system.size("v/x") == 900


def list_blocks() -> list[str]:
    paths = Paths.default()
    return [str(f) for n in list_local_nodes(paths) for f in paths.file_memory(n).glob("*/*")]


def test_what_is_appended_is_seen_when_it_is_flushed_and_two_writers_lose_nothing(
    system: InsituFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "SMALL_BYTES", 50)
    with system.open("v/log", "ab") as one, system.open("v/log", "ab") as two:
        one.write(b"hidden")
        assert not system.exists("v/log")
        for number in range(20):
            for file in (one, two):
                file.write(b"%d," % number)
                file.flush()
            assert system.cat("v/log").count(b"%d," % number) == 2
    lines = system.cat("v/log").removeprefix(b"hidden").split(b",")
    assert sorted(lines[:-1]) == sorted(b"%d" % n for n in range(20) for _ in "12")
    assert system.info("v/log")["blocks"] > 1 and system.info("v/log")["size"] == len(system.cat("v/log"))


def test_names_are_moved_listed_and_removed_as_in_other_file_systems(system: InsituFileSystem) -> None:
    system.pipe({"v/a/1": b"1", "v/a/b/2": b"22", "w/3": b"3"})
    assert system.ls("", detail=False) == ["v", "w"]
    assert system.ls("insitu://v/a", detail=False) == ["v/a/1", "v/a/b"]
    assert system.find("v") == ["v/a/1", "v/a/b/2"] and system.glob("v/a/*") == ["v/a/1", "v/a/b"]
    assert [(root, dirs, files) for root, dirs, files in system.walk("v/a")] == [
        ("v/a", ["b"], ["1"]),
        ("v/a/b", [], ["2"]),
    ]
    assert system.du("v") == 3 and system.isdir("v/a") and not system.isdir("v/a/1")
    system.mv("v/a", "v/new/place")
    system.mv("v/new/place/1", "w/1")
    assert system.find("v") == ["v/new/place/b/2"] and system.cat("w/1") == b"1"
    system.cp_file("w/1", "w/3")
    assert system.cat("w/3") == b"1"
    system.makedirs("v/empty", exist_ok=True)
    system.mv("w/3", "v/empty")
    assert system.cat("v/empty/3") == b"1"
    with pytest.raises(OSError, match="not empty"):
        system.rmdir("v/empty")
    system.rm("v/empty/*")
    system.rmdir("v/empty")
    for wrong, error in (
        (lambda: system.rm("v/new"), IsADirectoryError),
        (lambda: system.rm("v/no"), FileNotFoundError),
        (lambda: system.cat("v/new"), IsADirectoryError),
        (lambda: system.ls("v/no"), FileNotFoundError),
        (lambda: system.open("w/1/below", "wb").close(), NotADirectoryError),
        (lambda: system.open("v/new", "wb"), IsADirectoryError),
        (lambda: system.open("w/1", "xb"), FileExistsError),
        (lambda: system.mkdir("v/new"), FileExistsError),
        (lambda: system.open("v/new/../../x", "wb"), InputError),
        (lambda: system.open("w/1", "r+b"), InputError),
        (lambda: InsituFileSystem(copies=0), InputError),
    ):
        with pytest.raises(error):
            wrong()
    system.rm("insitu://v", recursive=True)
    assert system.ls("", detail=False) == ["w"]


def test_the_loss_of_a_store_loses_nothing_and_a_full_memory_neither(
    paths: Paths, system: InsituFileSystem
) -> None:
    for node in list_local_nodes(paths):
        set_file_memory(paths, node, 250_000)
    data = {f"v/{n}": os.urandom(100_000) for n in range(8)}
    system.pipe(data)
    usage: Any = system.client.measure_nodes()
    assert all(each["memory"] <= 250_000 for each in usage.values())
    assert sum(each["memory"] + each["disk"] for each in usage.values()) == 1_600_000
    shutil.rmtree(paths.node("node-1"))
    shutil.rmtree(paths.file_memory("node-1"), ignore_errors=True)
    found = InsituFileSystem(skip_instance_cache=True)
    assert {path: found.cat(path) for path in found.find("v")} == data
    report = found.repair("insitu://v")
    assert report.copied > 0 and not report.lost
    shutil.rmtree(paths.node("node-2"))
    shutil.rmtree(paths.file_memory("node-2"), ignore_errors=True)
    assert {path: found.cat(path) for path in found.find("v")} == data
    for node in ("node-1", "node-2"):  # whose folders aren't there to be cleaned up
        shutil.rmtree(paths.file_memory(node), ignore_errors=True)


def test_nodes_with_files_are_taken_down_by_force_alone_and_memory_is_given_back(
    paths: Paths, system: InsituFileSystem
) -> None:
    system.pipe("v/x", b"1" * 1000)
    memory = [paths.file_memory(node) for node in list_local_nodes(paths)]
    assert any(folder.exists() for folder in memory)
    with pytest.raises(InputError, match="insitu://: v"):
        take_down(paths)
    take_down(paths, force=True)
    assert not any(folder.exists() for folder in memory)
    bring_up(paths, 2)
    again = InsituFileSystem(skip_instance_cache=True)  # in the same process
    assert again.ls("") == []
    again.pipe("v/x", b"2")
    assert again.cat("v/x") == b"2"
    take_down(paths, force=True)


def test_all_who_share_a_home_may_change_names(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "is_shared", lambda home: True)
    open_local_names(Paths(home)).range("files/")
    assert {stat.S_IMODE(each.stat().st_mode) for each in home.glob("files.sqlite*")} == {0o660}


def test_a_cluster_that_cant_be_reached_is_named(paths: Paths, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    token.chmod(0o600)
    system = InsituFileSystem(cluster="127.0.0.1:9", token_file=str(token), skip_instance_cache=True)
    with pytest.raises((ClusterError, GridError), match=r"127\.0\.0\.1:9"):
        system.ls("v")
    assert json.loads(InsituFileSystem(skip_instance_cache=True).to_json())["protocol"] == "insitu"
