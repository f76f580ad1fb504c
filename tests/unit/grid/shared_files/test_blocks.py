"""Blocks in memory and on the disk: what moves when, and what never happens."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.base.errors import InputError, StorageFull
from insitu.grid.shared_files import BlockFolder, blocks, checksum_block

Room = namedtuple("Room", "total used free")
KEYS = [f"{number:032x}" for number in range(8)]


class Store:
    """A folder of blocks whose memory takes two of them, and whose disk as many as it is said to."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.memory, self.disk, self.home = home / "memory", home / "disk", home
        self.room = 1 << 20
        self.blocks = BlockFolder(home, self.disk, self.memory, lambda: 200, self.check)

    def check(self, need: int) -> None:
        if need > self.room:
            raise StorageFull("The quota is reached")

    def places(self) -> dict[str, str]:
        return {path.name: place.name for place in (self.memory, self.disk) for path in place.glob("v/*")}


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def put(store: Store, number: int) -> None:
    store.blocks.put("v", KEYS[number], bytes([number]) * 100)
    path = store.memory / "v" / KEYS[number]
    with contextlib.suppress(
        FileNotFoundError, NotADirectoryError
    ):  # as if a second had gone by, unless it is on the disk
        os.utime(path, (number, number))


def test_the_oldest_go_to_the_disk_when_the_memory_is_full(store: Store) -> None:
    for number in range(4):
        put(store, number)
    assert store.places() == {KEYS[0]: "disk", KEYS[1]: "disk", KEYS[2]: "memory", KEYS[3]: "memory"}
    assert store.blocks.measure() == (200, 200)
    assert [store.blocks.get("v", KEYS[n]) for n in range(4)] == [bytes([n]) * 100 for n in range(4)]
    store.blocks.put("v", KEYS[5], b"x" * 300)  # larger than the memory
    assert store.places()[KEYS[5]] == "disk"
    assert store.blocks.list_held("v").keys() == set(store.places())
    assert store.blocks.spill_all() == 0 and not store.memory.exists()
    assert set(store.places().values()) == {"disk"} and len(store.places()) == 5
    assert store.blocks.drop("v", KEYS) == 5 and store.blocks.list_volumes() == ["v"]


def test_a_block_that_was_read_lately_stays_in_memory(store: Store) -> None:
    put(store, 0)
    put(store, 1)
    store.blocks.get("v", KEYS[0])
    put(store, 2)
    assert store.places() == {KEYS[0]: "memory", KEYS[1]: "disk", KEYS[2]: "memory"}


def test_without_room_nothing_is_half_kept(store: Store) -> None:
    put(store, 0)
    put(store, 1)
    store.room = 0
    with pytest.raises(OSError, match="quota") as found:
        put(store, 2)
    assert found.value.errno == errno.ENOSPC
    assert store.places() == {KEYS[0]: "memory", KEYS[1]: "memory"}
    assert store.blocks.spill_all() == 2 and len(store.places()) == 2


def test_a_damaged_block_is_dropped_and_a_whole_one_isnt(store: Store) -> None:
    put(store, 1)
    whole = checksum_block(bytes([1]) * 100)
    assert not store.blocks.drop_damaged("v", KEYS[1], whole)
    (store.memory / "v" / KEYS[1]).write_bytes(b"other")
    assert store.blocks.drop_damaged("v", KEYS[1], whole)
    assert not store.blocks.drop_damaged("v", KEYS[1], whole)
    with pytest.raises(FileNotFoundError):
        store.blocks.get("v", KEYS[1])


def test_leftovers_of_killed_writers_go_and_dont_count(store: Store) -> None:
    put(store, 1)
    left = store.memory / "v" / f"{KEYS[2]}.7-8.partial"
    left.write_bytes(b"half")
    assert store.blocks.list_held("v").keys() == {KEYS[1]}
    store.blocks.sweep(left.stat().st_mtime + 10)
    assert left.exists()
    store.blocks.sweep(left.stat().st_mtime + 4000)
    assert not left.exists() and store.places() == {KEYS[1]: "memory"}


def test_an_empty_file_that_a_power_cut_has_left_is_no_block(store: Store) -> None:
    put(store, 1)
    (store.memory / "v" / KEYS[1]).write_bytes(b"")
    assert store.blocks.list_held("v") == {}
    put(store, 1)
    assert store.blocks.list_held("v").keys() == {KEYS[1]} and store.blocks.get("v", KEYS[1]) == b"\1" * 100


def test_names_dont_lead_out(store: Store) -> None:
    for volume, key in (("..", KEYS[0]), ("v", "../../x"), ("v", "x")):
        with pytest.raises(InputError):
            store.blocks.get(volume, key)


@pytest.mark.parametrize("kind", ["open", "other", "link", "file", "pipe"])
def test_memory_that_is_not_this_users_alone_is_not_used(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can make the folder first: an agent refused each block then, or waited for a pipe in there."""
    elsewhere = store.home / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "v").mkdir()
    (elsewhere / "v" / KEYS[1]).write_bytes(b"secret")
    if kind == "link":
        store.memory.symlink_to(elsewhere)
    elif kind == "file":
        store.memory.touch()
    elif kind == "pipe":
        os.mkfifo(store.memory)
    else:
        elsewhere.rename(store.memory)
        store.memory.chmod(0o755 if kind == "open" else 0o700)
        if kind == "other":
            monkeypatch.setattr(blocks.os, "geteuid", lambda: os.getuid() + 1)
    put(store, 0)
    put(store, 2)
    assert (store.disk / "v" / KEYS[0]).exists() and store.blocks.measure() == (0, 200)
    assert caplog.text.count("must be a folder of this user alone") == 1
    with pytest.raises(FileNotFoundError):
        store.blocks.get("v", KEYS[1])
    assert store.blocks.spill_all() == 0 and os.path.lexists(store.memory)


def test_memory_is_used_by_its_descriptor_and_files_alone_in_it(store: Store) -> None:
    put(store, 0)
    os.mkfifo(store.memory / "v" / KEYS[1])
    (store.memory / "v" / KEYS[2]).symlink_to(store.memory / "v" / KEYS[0])
    for number in (1, 2):
        with pytest.raises(FileNotFoundError):
            store.blocks.get("v", KEYS[number])
        assert store.blocks.keep("v", [KEYS[number]]) == []
    assert store.blocks.list_held("v").keys() == {KEYS[0]}
    put(store, 3)
    put(store, 4)  # moves the oldest
    assert store.places()[KEYS[0]] == "disk"
    store.memory.rename(store.home / "away")
    store.memory.mkdir()
    assert store.blocks.get("v", KEYS[3]) == bytes([3]) * 100
    (store.home / "away").rename(store.home / "memory2")
    assert store.blocks.drop("v", [KEYS[3]]) == 1


def test_memory_that_was_removed_is_made_again(store: Store) -> None:
    put(store, 0)
    shutil.rmtree(store.memory)
    with pytest.raises(FileNotFoundError):
        store.blocks.get("v", KEYS[0])
    assert not store.memory.exists()
    put(store, 1)
    assert store.places() == {KEYS[1]: "memory"}


def test_what_goes_to_the_disk_at_the_end_is_synced_before_memory_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 0)
    put(store, 1)
    synced, fail, sync = list[str](), [True], os.fsync

    def note(descriptor: int) -> None:
        if fail[0]:
            raise OSError(errno.EIO, "the disk fails")
        assert len(list((store.memory / "v").iterdir())) == 2
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    assert store.blocks.spill_all() == 2 and store.blocks.measure()[0] == 200
    fail[0] = False
    assert store.blocks.spill_all() == 0 and not store.memory.exists()
    assert {KEYS[0], KEYS[1], "v", store.disk.name} <= set(synced)


def test_what_is_put_on_the_disk_is_synced_before_it_is_acknowledged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, failing, sync = list[str](), set[str](), os.fsync

    def note(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition(".")[0]
        if name in failing:
            raise OSError(errno.EIO, "the disk fails")
        synced.append(name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    put(store, 0)
    assert synced == []  # in memory
    large = bytes(300)  # more than the memory takes
    store.blocks.put("v", KEYS[1], large)
    # The bytes before the name: it is there whole, or not at all.
    assert synced == [KEYS[1], "v", store.disk.name, store.home.name]
    for name in (KEYS[2], "v"):
        failing.add(name)
        with pytest.raises(OSError, match="the disk fails"):
            store.blocks.put("v", KEYS[2], large)
        assert store.places() == {KEYS[0]: "memory", KEYS[1]: "disk"}
        failing.clear()


def test_old_blocks_are_dropped_unless_they_are_kept_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        store.blocks.put("v", KEYS[number], b"x")
    ahead = [0.0, 0.0]
    clock = SimpleNamespace(
        time=lambda: time.time() + ahead[0], monotonic=lambda: time.monotonic() + ahead[1]
    )
    monkeypatch.setattr(blocks, "time", clock)
    for ahead[:] in ([5000.0, 0.0], [-5000.0, 5000.0]):  # one of the clocks says that they are young
        assert max(store.blocks.list_held("v").values()) < 3600.0
        assert store.blocks.drop("v", KEYS[:2], 3600.0) == 0 and len(store.places()) == 2
    ahead[:] = [5000.0, 5000.0]
    assert min(store.blocks.list_held("v").values()) > 3600.0
    store.blocks.keep("v", KEYS[:1])
    assert store.blocks.drop("v", KEYS[:2], 3600.0) == 1
    assert store.places().keys() == {KEYS[0]}
    store.blocks.sweep(clock.time())
    assert len(store.blocks._touched) == 1


def test_many_threads_keep_within_the_memory(store: Store) -> None:
    threads = [threading.Thread(target=put, args=(store, number)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory, disk = store.blocks.measure()
    assert memory <= 200 and memory + disk == 800


def test_some_of_the_disk_stays_free(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are moved to the disk as an agent ends left no room for it to begin again."""
    free = [1000]
    monkeypatch.setattr(blocks.shutil, "disk_usage", lambda folder: Room(2000, 2000 - free[0], free[0]))
    for number in range(2):
        put(store, number)
    free[0] = 2000 // blocks._RESERVE_SHARE + 99  # a block has 100 bytes
    assert store.blocks.spill_all() == 2 and set(store.places().values()) == {"memory"}
    with pytest.raises(OSError, match="leave 100 bytes of the disk") as caught:
        store.blocks.put("v", KEYS[5], b"x" * 300)
    assert caught.value.errno == errno.ENOSPC
    free[0] += 1
    assert store.blocks.spill_all() == 0 and set(store.places().values()) == {"disk"}
