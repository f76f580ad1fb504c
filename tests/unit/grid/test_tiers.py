"""Partitions on a second path: the same rows and bits, and a move that is killed does no harm."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from foreign_user import NOBODY, needs_root

from insitu.context import Context
from insitu.errors import CacheBusy, CorruptPartition, GridError, InputError, StorageFull, UnknownCache
from insitu.grid import (
    Catalog,
    bring_up,
    dataset,
    delete_cache,
    find_slow_copies,
    import_cache,
    measure_store,
    move_cache,
    repair_catalog,
    scrub_cache,
    set_up_stores,
    sweep,
    take_down,
)
from insitu.grid import tiers as module
from insitu.grid.files import cache_locks
from insitu.grid.partitions import file_checksum
from insitu.grid.store_identity import list_nodes_with_stores
from insitu.grid.store_settings import read_settings, remove_slow_version
from insitu.grid.tiers import find_leftovers, find_slow
from insitu.grid.verification import is_verified
from insitu.paths import Paths, TierPaths
from insitu.spec import CacheSpec, NodeId

NODE = NodeId("node-0")
ROWS = 20_000


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "slow"
    path.mkdir()
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(2 * ROWS).reshape(-1, 2))
    return tmp_path / "a.npy"


@pytest.fixture
def cache(paths: Paths, slow: Path, source: Path) -> CacheSpec:
    """A cache of two partitions on a node with a second path."""
    set_up_stores(paths, [NODE], tier=slow)
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=2)
    return cache


def tier_of(paths: Paths, node: NodeId = NODE) -> TierPaths:
    tier = read_settings(paths, node).tier
    assert tier is not None
    return tier


def files_of(paths: Paths, cache: CacheSpec, node: NodeId = NODE) -> list[Path]:
    return [paths.partition(node, cache.name, cache.version, p.index) for p in cache.partitions]


def check_whole(paths: Paths, cache: CacheSpec) -> None:
    for info, path in zip(cache.partitions, files_of(paths, cache), strict=True):
        assert file_checksum(path) == info.checksum and path.stat().st_size == info.bytes


def leftovers(paths: Paths, cache: CacheSpec) -> list[Path]:
    return find_leftovers(paths, tier_of(paths), NODE, cache.name)


def read(context: Context, **options: Any) -> list[Any]:
    return [batch.data.tolist() for batch in dataset("a/b", context=context).shuffle(**options).batch(640)]


def test_rows_and_their_order_stay(paths: Paths, cache: CacheSpec, alone: Context) -> None:
    def orders() -> list[Any]:
        return [read(alone, seed=3), read(alone, seed=3, exact=False, window_bytes=1 << 16)]

    before, bits = orders(), [path.read_bytes() for path in files_of(paths, cache)]
    (move,) = move_cache(paths, "a/b", "slow")
    assert (move.node, move.version, move.partitions, move.bytes) == (NODE, 1, 2, cache.bytes)
    assert find_slow_copies(paths, cache) == {0: [NODE], 1: [NODE]}
    assert Catalog(paths).get("a/b") == cache and orders() == before
    assert [path.read_bytes() for path in files_of(paths, cache)] == bits
    assert [find_slow(p) for p in files_of(paths, cache)] == [
        tier_of(paths).partition("a/b", 1, index) for index in (0, 1)
    ]
    assert move_cache(paths, "a/b", "slow")[0].partitions == 0, "they lie there already"
    assert move_cache(paths, "a/b", "fast")[0].bytes == cache.bytes
    assert not find_slow_copies(paths, cache) and orders() == before
    assert [path.read_bytes() for path in files_of(paths, cache)] == bits
    assert not list(tier_of(paths).root.iterdir())


def test_what_was_verified_is_not_read_again(paths: Paths, cache: CacheSpec) -> None:
    for to in ("slow", "fast"):
        for path in files_of(paths, cache):
            os.utime(path, (1, 1))
        move_cache(paths, "a/b", to)  # type: ignore[arg-type]
        for info, path in zip(cache.partitions, files_of(paths, cache), strict=True):
            assert is_verified(path, info, paths.verified(NODE, "a/b", 1, info.index))


def test_bytes_are_counted_where_they_lie(paths: Paths, cache: CacheSpec) -> None:
    before = measure_store(paths, NODE)
    assert before.slow == 0
    move_cache(paths, "a/b", "slow")
    after = measure_store(paths, NODE)
    assert after.slow == cache.bytes and before.used - after.used >= 0.99 * cache.bytes


def test_who_has_a_partition_open_reads_on(paths: Paths, cache: CacheSpec, alone: Context) -> None:
    whole = read(alone, seed=1)
    batches = iter(dataset("a/b", context=alone).shuffle(seed=1).batch(640))
    found = [next(batches).data.tolist()]
    move_cache(paths, "a/b", "slow")
    found.append(next(batches).data.tolist())
    move_cache(paths, "a/b", "fast")
    assert [*found, *(batch.data.tolist() for batch in batches)] == whole


def lines_of_a_move(paths: Paths, to: str) -> Iterator[Callable[[], int]]:
    """Yield functions that each move the cache in a child, which is killed when it comes to a further line of
    the module for the first time; they return its exit status. The last one isn't killed."""
    seen: set[int] = set()
    while True:
        out, into = os.pipe()

        def move(into: int = into, out: int = out) -> int:
            child = os.fork()
            if not child:
                try:
                    sys.settrace(lambda frame, event, argument: trace(frame))

                    def trace(frame: FrameType) -> Any:
                        if frame.f_code.co_filename != module.__file__:
                            return None

                        def line(frame: FrameType, event: str, argument: object) -> Any:
                            if event == "line" and frame.f_lineno not in seen:
                                os.write(into, frame.f_lineno.to_bytes(4, "big"))
                                os._exit(9)
                            return line

                        return line

                    move_cache(paths, "a/b", to)  # type: ignore[arg-type]
                    os._exit(0)
                finally:
                    os._exit(1)
            os.close(into)
            with open(out, "rb") as pipe:
                killed_at = pipe.read()
            if killed_at:
                seen.add(int.from_bytes(killed_at, "big"))
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        yield move


@pytest.mark.parametrize(
    ("to", "back"), [pytest.param("slow", "fast", marks=pytest.mark.slow), ("fast", "slow")]
)
def test_a_move_that_is_killed_anywhere_leaves_each_partition_whole(
    paths: Paths, cache: CacheSpec, to: Any, back: Any
) -> None:
    move_cache(paths, "a/b", back)
    kills, leaving = 0, 0
    for move in lines_of_a_move(paths, to):
        code = move()
        check_whole(paths, cache)
        if code == 0:
            break
        assert code == 9
        kills += 1
        leaving += bool(leftovers(paths, cache))
        if kills % 2:
            sweep(paths)
            assert not leftovers(paths, cache)
            check_whole(paths, cache)
        else:
            move_cache(paths, "a/b", to)
            check_whole(paths, cache)
            assert len(find_slow_copies(paths, cache)) == (2 if to == "slow" else 0)
            assert not leftovers(paths, cache)
        move_cache(paths, "a/b", back)
        assert not leftovers(paths, cache)
    assert kills > 30 and leaving > 3


def test_a_dropped_version_leaves_nothing_on_the_second_path(
    paths: Paths, cache: CacheSpec, source: Path
) -> None:
    move_cache(paths, "a/b", "slow")
    (new,) = import_cache(paths, "a/b", [str(source)], overwrite=True)
    assert not list(tier_of(paths).root.iterdir()) and not find_slow_copies(paths, new)


def test_what_a_disk_that_was_away_still_has_is_swept(paths: Paths, cache: CacheSpec, source: Path) -> None:
    move_cache(paths, "a/b", "slow")
    root, away = tier_of(paths).root, tier_of(paths).root.with_name("away")
    root.rename(away)
    import_cache(paths, "a/b", [str(source)], overwrite=True)
    away.rename(root)
    assert sweep(paths) == cache.bytes and not list(root.iterdir())


def test_a_sweep_leaves_what_a_living_move_writes(paths: Paths, cache: CacheSpec) -> None:
    tier = tier_of(paths)
    target = tier.partition("a/b", 1, 0)
    target.parent.mkdir(parents=True)
    target.write_text("half")
    with cache_locks(paths, ["a/b"]):
        assert sweep(paths) == 0 and target.exists()
        with pytest.raises(CacheBusy, match="importing into a/b or moves it"):
            move_cache(paths, "a/b", "slow")
    assert sweep(paths) == 4 and not list(tier.root.iterdir())


def test_appended_versions_share_files_on_the_second_path(
    paths: Paths, cache: CacheSpec, tmp_path: Path, alone: Context
) -> None:
    Catalog(paths).pin("a/b", 1, "job")
    move_cache(paths, "a/b", "slow")
    np.save(tmp_path / "more.npy", np.full((10, 2), 7))
    (new,) = import_cache(paths, "a/b", [str(tmp_path / "more.npy")], append=True)
    assert sorted(find_slow_copies(paths, new)) == [0, 1], "what is new comes into the store"
    assert os.path.samefile(files_of(paths, cache)[0], files_of(paths, new)[0])
    assert measure_store(paths, NODE).slow == cache.bytes
    Catalog(paths).unpin("job")
    assert not tier_of(paths).version("a/b", 1).exists()
    check_whole(paths, new)
    assert sum(len(rows) for rows in read(alone)) == ROWS + 10


@pytest.mark.parametrize("is_slow", [True, False])
def test_rows_are_not_appended_to_partitions_that_are_away(
    is_slow: bool, paths: Paths, cache: CacheSpec, slow: Path, source: Path
) -> None:
    if is_slow:
        move_cache(paths, cache.name, "slow")
        slow.rename(slow.with_name("away"))
    else:
        files_of(paths, cache)[1].unlink()
    done: list[int] = []
    where = rf"can't be found at {slow}/.*on the second path" if is_slow else "part-00001.arrow is corrupt"
    with pytest.raises(CorruptPartition, match=where):
        import_cache(
            paths, cache.name, [str(source)], append=True, progress=lambda rows, *_: done.append(rows)
        )
    assert not done  # nothing was read for nothing
    assert Catalog(paths).get(cache.name) == cache


def test_versions_that_share_files_move_together_and_share_them_still(
    paths: Paths, cache: CacheSpec, tmp_path: Path
) -> None:
    Catalog(paths).pin("a/b", 1, "job")
    np.save(tmp_path / "more.npy", np.full((10, 2), 7))
    (new,) = import_cache(paths, "a/b", [str(tmp_path / "more.npy")], append=True)
    for to in ("slow", "fast"):
        moves = move_cache(paths, "a/b", to)  # type: ignore[arg-type]
        assert [(m.version, m.partitions) for m in moves] == [(1, 2), (2, 3)]
        assert os.path.samefile(files_of(paths, cache)[1], files_of(paths, new)[1])
        assert measure_store(paths, NODE).slow == (new.bytes if to == "slow" else 0)
        check_whole(paths, cache)
        check_whole(paths, new)


def test_an_import_that_was_cut_off_while_it_shared_goes_on(
    paths: Paths, cache: CacheSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_cache(paths, "a/b", "slow")
    np.save(tmp_path / "more.npy", np.full((10, 2), 7))
    with monkeypatch.context() as patch:
        patch.setattr("insitu.grid.import_owners.prepare_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            import_cache(paths, "a/b", [str(tmp_path / "more.npy")], append=True, resume=True)
    sweep(paths)
    check_whole(paths, cache)
    (new,) = import_cache(paths, "a/b", [str(tmp_path / "more.npy")], append=True, resume=True)
    check_whole(paths, new)
    assert new.rows == ROWS + 10 and sorted(find_slow_copies(paths, new)) == [0, 1]


def test_a_second_path_that_is_away_is_named_and_a_backup_is_read(
    paths: Paths, slow: Path, source: Path, alone: Context
) -> None:
    bring_up(paths, 2)
    set_up_stores(paths, [NODE], tier=slow)
    import_cache(paths, "a/b", [str(source)], partitions=2, backups=1)
    whole = read(alone, seed=1)
    with pytest.raises(InputError, match=r"node-1, which has none.*--tier PATH"):
        move_cache(paths, "a/b", "slow")
    (move,) = move_cache(paths, "a/b", "slow", nodes=[NODE])
    assert move.partitions == 2
    slow.rename(slow.with_name("away"))
    assert read(alone, seed=1) == whole
    for path in files_of(paths, Catalog(paths).get("a/b"), NodeId("node-1")):
        path.unlink()
    with pytest.raises(
        CorruptPartition, match=rf"can't be found at {slow}.*, on the second path of its store"
    ):
        read(alone, seed=1)
    with pytest.raises(CorruptPartition, match="on the second path"):
        move_cache(paths, "a/b", "fast", nodes=[NODE])


def test_a_scrub_repairs_a_copy_where_it_lies(paths: Paths, slow: Path, source: Path) -> None:
    bring_up(paths, 2)
    set_up_stores(paths, [NODE], tier=slow)
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=2, backups=1)
    move_cache(paths, "a/b", "slow", nodes=[NODE])
    path = files_of(paths, cache)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert scrub_cache(paths, cache, repair=True)[0].repaired
    check_whole(paths, cache)
    assert sorted(find_slow_copies(paths, cache)) == [0, 1]
    slow.rename(slow.with_name("broken"))
    assert all(check.repaired for check in scrub_cache(paths, cache, repair=True) if check.node == NODE)
    check_whole(paths, cache)
    assert not find_slow_copies(paths, cache), "the second path is lost"


def test_a_damaged_partition_stays_where_it_is(paths: Paths, cache: CacheSpec) -> None:
    second = files_of(paths, cache)[1]
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 1
    second.write_bytes(data)
    with pytest.raises(CorruptPartition, match=r"part-00001.arrow.*its checksum is"):
        move_cache(paths, "a/b", "slow")
    assert find_slow_copies(paths, cache) == {0: [NODE]} and second.read_bytes() == data
    assert not leftovers(paths, cache)


def test_a_disk_that_gives_back_other_bytes_gets_nothing(
    paths: Paths, cache: CacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "file_checksum", lambda path, on_read: "crc32:00000000")
    with pytest.raises(GridError, match=r"give back what was written.*slow.*stays where it was"):
        move_cache(paths, "a/b", "slow")
    check_whole(paths, cache)
    assert not find_slow_copies(paths, cache) and not leftovers(paths, cache)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, StorageFull, r"No room is left for .*slow.*Free some space there"),
        (errno.EIO, GridError, r"disk must take what is written to .*slow.*system's log"),
        (errno.EROFS, GridError, r"second path must be a folder that insitu can write to.*Mount it"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "mkdir"])
def test_errors_of_a_second_path_name_it_and_leave_partitions_whole(
    paths: Paths,
    cache: CacheSpec,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    words: str,
    call: str,
) -> None:
    original = getattr(os, call)

    def refuse(where: int | str, *arguments: Any, **options: Any) -> Any:
        named = os.path.realpath(f"/proc/self/fd/{where}" if isinstance(where, int) else os.fspath(where))
        if "/slow/" in named:
            raise OSError(number, os.strerror(number))
        return original(where, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(kind, match=words):
            move_cache(paths, "a/b", "slow")
    check_whole(paths, cache)
    assert not leftovers(paths, cache) and not find_slow_copies(paths, cache)
    assert move_cache(paths, "a/b", "slow")[0].partitions == 2


def test_a_second_path_without_room_is_refused_before(
    paths: Paths, cache: CacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": cache.bytes - 1})
    monkeypatch.setattr("insitu.grid.tiering.shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageFull, match=rf"slow.*{cache.bytes} bytes to move.*{cache.bytes - 1} are free"):
        move_cache(paths, "a/b", "slow")
    assert not find_slow_copies(paths, cache)


def test_a_second_path_in_use_is_not_changed(paths: Paths, cache: CacheSpec, tmp_path: Path) -> None:
    move_cache(paths, "a/b", "slow")
    other = tmp_path / "other"
    other.mkdir()
    for tier in (other, None):
        with pytest.raises(InputError, match=r"2 file\(s\) of node-0 in .*insitu tier CACHE --to fast"):
            set_up_stores(paths, [NODE], tier=tier)
    slow = tier_of(paths).root.parent
    slow.rename(tmp_path / "away")
    for tier in (other, None):
        with pytest.raises(InputError, match=r"2 partition\(s\) of node-0 in .* isn't there now. Mount it"):
            set_up_stores(paths, [NODE], tier=tier)
    (tmp_path / "away").rename(slow)
    move_cache(paths, "a/b", "fast")
    set_up_stores(paths, [NODE], tier=other)
    assert tier_of(paths).root.parent == other


def test_down_removes_what_lies_there(paths: Paths, cache: CacheSpec, slow: Path) -> None:
    move_cache(paths, "a/b", "slow")
    take_down(paths, force=True)
    assert not list(slow.iterdir())


def test_a_lost_catalogue_is_rebuilt(paths: Paths, cache: CacheSpec, alone: Context) -> None:
    whole = read(alone, seed=1)
    move_cache(paths, "a/b", "slow")
    paths.catalog.unlink()
    (tier_of(paths).version("a/b", 1) / "part-00009.arrow").touch()
    assert sweep(paths) == 0 and leftovers(paths, cache), "without a catalogue everything stays"
    assert [c.name for c in repair_catalog(paths).restored] == ["a/b"]
    assert read(alone, seed=1) == whole and len(find_slow_copies(paths, cache)) == 2


def test_unknown_caches_and_nodes(paths: Paths, cache: CacheSpec) -> None:
    with pytest.raises(UnknownCache):
        move_cache(paths, "b", "slow")
    with pytest.raises(InputError, match=r"partitions of a/b: node-0. Received: node-1"):
        move_cache(paths, "a/b", "slow", nodes=[NodeId("node-1")])


def test_a_deleted_cache_leaves_nothing_on_the_second_path(paths: Paths, cache: CacheSpec) -> None:
    move_cache(paths, "a/b", "slow")
    delete_cache(paths, "a/b")
    assert not list(tier_of(paths).root.iterdir())


def test_links_that_others_put_into_a_second_path_remove_nothing(
    paths: Paths, cache: CacheSpec, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    (private / "v9").mkdir(parents=True)
    for file in (private / "letter", private / "v9" / "letter"):
        file.write_text("mine")
    store = tier_of(paths).cache_store("a/b")
    move_cache(paths, "a/b", "slow")
    (store / "v7").symlink_to(private)
    assert not leftovers(paths, cache)
    move_cache(paths, "a/b", "fast")
    (store / "v7").unlink(missing_ok=True)
    store.rmdir()
    store.symlink_to(private)
    assert not leftovers(paths, cache)
    with pytest.raises(GridError, match="Not a directory"):
        move_cache(paths, "a/b", "slow")
    remove_slow_version(paths, NODE, "a/b", 9)
    sweep(paths)
    assert (private / "letter").exists() and (private / "v9" / "letter").exists()
    check_whole(paths, cache)


def test_a_link_out_of_the_second_path_is_not_removed_or_written_to(
    paths: Paths, slow: Path, source: Path, tmp_path: Path
) -> None:
    nodes = [NODE, NodeId("node-1")]
    bring_up(paths, len(nodes))
    set_up_stores(paths, nodes, tier=slow)
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=1, backups=1)
    (path,) = files_of(paths, cache)
    elsewhere = tmp_path / "elsewhere"
    shutil.copy2(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)
    move_cache(paths, "a/b", "fast")
    assert elsewhere.exists() and find_slow(path) is None
    elsewhere.write_text("mine")
    path.unlink()
    path.symlink_to(elsewhere)
    scrub_cache(paths, cache, repair=True)
    assert elsewhere.read_text() == "mine"
    check_whole(paths, cache)


def test_sharing_a_second_path_leaves_what_links_lead_to(
    paths: Paths, cache: CacheSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_cache(paths, "a/b", "slow")
    other = tmp_path / "other"
    other.touch(mode=0o600)
    folder = tier_of(paths).cache_store("a/b") / "v1"
    (folder / "link").symlink_to(other)
    paths.home.chmod(0o2770)
    changed: list[str] = []

    def change_owner(path: str, *_: object, dir_fd: int, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        changed.append(path)

    monkeypatch.setattr(os, "chown", change_owner)
    module.open_tier(paths, tier_of(paths))
    assert "link" in changed and other.stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o777 == 0o660 for path in folder.glob("*.arrow"))


def swap(folder: Path, private: Path) -> None:
    """Do what another member of a shared home does between two steps of a victim's process."""
    folder.rename(folder.with_name(".away"))
    folder.symlink_to(private)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the victim with a file that is named as a partition is."""
    path = tmp_path / "private"
    path.mkdir()
    (path / "part-00000.arrow").write_text("mine")
    return path


def check_private(private: Path) -> None:
    assert [file.name for file in private.iterdir()] == ["part-00000.arrow"]
    assert (private / "part-00000.arrow").read_text() == "mine"


def after(monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], object]) -> None:
    """Call `then` after the first call of a function of the module."""
    original, left = getattr(module, name), [then]

    def wrapped(*arguments: Any) -> Any:
        found = original(*arguments)
        while left:
            left.pop()()
        return found

    monkeypatch.setattr(module, name, wrapped)


def test_a_link_that_comes_before_a_move_writes_gets_nothing(
    paths: Paths, cache: CacheSpec, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tier_of(paths).version("a/b", 1)
    after(monkeypatch, "make_tier_folder", lambda: swap(folder, private))
    with pytest.raises(GridError, match="Not a directory"):
        move_cache(paths, "a/b", "slow")
    check_private(private)
    check_whole(paths, cache)


def test_a_link_that_comes_before_a_move_removes_loses_nothing(
    paths: Paths, cache: CacheSpec, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_cache(paths, "a/b", "slow")
    folder = tier_of(paths).version("a/b", 1)
    after(monkeypatch, "lies_in_tier", lambda: swap(folder, private))
    with pytest.raises((GridError, CorruptPartition)):  # the second partition is away
        move_cache(paths, "a/b", "fast")
    check_private(private)


def test_a_link_that_comes_before_a_sweep_removes_loses_nothing(
    paths: Paths, cache: CacheSpec, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_cache(paths, "a/b", "slow")
    for path in files_of(paths, cache):
        path.unlink()  # so that what lies on the second path is left over
    folder = tier_of(paths).version("a/b", 1)
    after(monkeypatch, "find_leftovers", lambda: swap(folder, private))
    module.sweep_tier(paths, tier_of(paths), NODE, "a/b")
    check_private(private)


def test_a_store_whose_folder_is_swapped_is_not_left_by_a_move(
    paths: Paths, cache: CacheSpec, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = paths.version(NODE, "a/b", 1)
    move_cache(paths, "a/b", "slow")
    original = module.copy_verified

    def copy(*arguments: Any) -> None:
        original(*arguments)
        if not store.is_symlink():
            swap(store, private)

    monkeypatch.setattr(module, "copy_verified", copy)
    with contextlib.suppress(GridError, CorruptPartition):
        move_cache(paths, "a/b", "fast")
    assert store.is_symlink()
    check_private(private)


@needs_root
def test_what_links_of_others_in_a_store_lead_to_is_not_swept(
    paths: Paths, cache: CacheSpec, source: Path, tmp_path: Path
) -> None:
    """A version that the catalogue doesn't know is removed: any folder of the victim that is called `v1`."""
    victims = tmp_path / "photos"
    (victims / "v1").mkdir(parents=True)
    import_cache(paths, "photos", [str(source)])
    import_cache(paths, "photos", [str(source)], overwrite=True)
    (paths.nodes / "evil").mkdir()
    for link in (paths.nodes / "evil" / "photos", paths.nodes / "other"):
        link.symlink_to(victims if link.name == "photos" else tmp_path)
        os.chown(link, NOBODY, -1, follow_symlinks=False)
    sweep(paths)
    assert (victims / "v1").exists()
    assert "other" not in list_nodes_with_stores(paths)


@needs_root
def test_what_a_link_of_others_leads_to_is_not_removed_with_a_cache(
    paths: Paths, cache: CacheSpec, tmp_path: Path
) -> None:
    (tmp_path / "mine" / "v1").mkdir(parents=True)
    store = paths.cache_store(NODE, "a/b")
    store.rename(tmp_path / "away")
    store.symlink_to(tmp_path / "mine")
    os.chown(store, NOBODY, -1, follow_symlinks=False)
    delete_cache(paths, "a/b")
    assert (tmp_path / "mine" / "v1").exists()


@needs_root
def test_what_a_link_of_others_leads_to_is_not_appended(
    paths: Paths, cache: CacheSpec, source: Path, tmp_path: Path
) -> None:
    """It would have been in the shared store then, for all members to read."""
    path = files_of(paths, cache)[0]
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * path.stat().st_size)
    path.unlink()
    path.symlink_to(secret)
    os.chown(path, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(GridError, match=rf"user {NOBODY} has made a link to .*secret"):
        import_cache(paths, "a/b", [str(source)], append=True)
    assert secret.stat().st_nlink == 1
