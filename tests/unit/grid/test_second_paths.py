"""What an earlier insitu has moved to a second path is read there, and comes back whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_user import NOBODY, needs_root
from old_second_path import NODE, move_there, set_second_path

from insitu.base.context import Context
from insitu.base.errors import CorruptPartition, StorageFull
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import (
    Catalog,
    bring_up,
    dataset,
    delete_cache,
    find_second_paths,
    import_cache,
    measure_store,
    repair_catalog,
    scrub_cache,
    set_quotas,
    sweep,
    take_down,
)
from insitu.grid.maintenance.repair import find_links
from insitu.grid.partitions import file_checksum
from insitu.grid.stores.store_settings import read_settings

ROWS = 20_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(2 * ROWS).reshape(-1, 2))
    return tmp_path / "a.npy"


@pytest.fixture
def cache(paths: Paths, source: Path) -> CacheSpec:
    """A cache of two partitions on one node."""
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=2)
    return cache


@pytest.fixture
def root(paths: Paths, cache: CacheSpec, tmp_path: Path) -> Path:
    """The folder on a second path, where both of the cache's partitions are."""
    root = set_second_path(paths, tmp_path / "slow")
    move_there(paths, root, cache)
    return root


def files_of(paths: Paths, cache: CacheSpec, node: NodeId = NODE) -> list[Path]:
    return [paths.partition(node, cache.name, cache.version, p.index) for p in cache.partitions]


def check_whole(paths: Paths, cache: CacheSpec) -> None:
    for info, path in zip(cache.partitions, files_of(paths, cache), strict=True):
        assert file_checksum(path) == info.checksum and path.stat().st_size == info.bytes


def read(context: Context, **options: Any) -> list[Any]:
    return [batch.data.tolist() for batch in dataset("a/b", context=context).shuffle(**options).batch(640)]


def test_a_store_of_before_is_read_and_repaired(
    paths: Paths, cache: CacheSpec, alone: Context, tmp_path: Path
) -> None:
    whole, bits = read(alone, seed=1), [path.read_bytes() for path in files_of(paths, cache)]
    root = set_second_path(paths, tmp_path / "slow", quota=10**9)
    links = move_there(paths, root, cache)
    assert find_second_paths(paths) == {NODE: root} and find_links(paths, NODE, root) == links
    assert read(alone, seed=1) == whole and sweep(paths) == 0
    assert repair_catalog(paths, dry_run=True).brought_back == {NODE: (2, 0)}
    assert find_links(paths, NODE, root) == links, "a dry run moves nothing"
    report = repair_catalog(paths)
    assert report.brought_back == {NODE: (2, 0)} and report.complete and not report.problems
    assert not any(path.is_symlink() for path in links) and not root.exists()
    assert [path.read_bytes() for path in files_of(paths, cache)] == bits and read(alone, seed=1) == whole
    assert {path.stat().st_mode & 0o777 for path in links} == {0o600}
    assert find_second_paths(paths) == {} and read_settings(paths, NODE).quota == 10**9
    assert "tier" not in json.loads(json.loads(paths.store_settings(NODE).read_text())["state"])
    assert repair_catalog(paths).brought_back == {}


def test_settings_keep_the_path_while_partitions_lie_there(paths: Paths, root: Path) -> None:
    set_quotas(paths, [NODE], quota=10**9)
    assert find_second_paths(paths) == {NODE: root}


def test_a_lost_catalogue_comes_back_with_them(
    paths: Paths, cache: CacheSpec, root: Path, alone: Context
) -> None:
    whole = read(alone, seed=1)
    paths.catalog.unlink()
    report = repair_catalog(paths)
    assert [c.name for c in report.restored] == ["a/b"] and report.brought_back == {NODE: (2, 0)}
    assert read(alone, seed=1) == whole


@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_full_disk_leaves_each_partition_whole_in_one_place(
    failing: str, paths: Paths, cache: CacheSpec, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, copy = [1 if failing == "second" else 0], shutil.copyfileobj

    def fill(old: Any, new: Any, *rest: Any) -> None:
        if not left[0]:
            new.write(old.read(1000))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        copy(old, new, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("insitu.grid.replicas.scrubbing.shutil.copyfileobj", fill)
        report = repair_catalog(paths)
    moved = 1 if failing == "second" else 0
    assert report.brought_back == {NODE: (moved, 2 - moved)} and not report.complete
    assert sum("No room is left for" in problem for problem in report.problems) == 1, "it ends there"
    check_whole(paths, cache)
    files = files_of(paths, cache)
    assert [path.is_symlink() for path in files] == [not moved, True]
    assert len(list(root.rglob("*.arrow"))) == 2 - moved and find_second_paths(paths) == {NODE: root}
    assert not [path for path in files[0].parent.iterdir() if path.name.startswith(".part")]
    assert repair_catalog(paths).brought_back == {NODE: (2 - moved, 0)}
    check_whole(paths, cache)


def test_a_quota_that_is_too_small_moves_nothing(paths: Paths, cache: CacheSpec, root: Path) -> None:
    set_quotas(paths, [NODE], quota=measure_store(paths, NODE).used + 1000)
    report = repair_catalog(paths)
    assert report.brought_back == {NODE: (0, 2)} and not report.complete
    assert any("insitu quota node-0 SIZE" in problem for problem in report.problems)
    check_whole(paths, cache)


def test_a_damaged_partition_stays_where_it_is(paths: Paths, cache: CacheSpec, root: Path) -> None:
    first, second = files_of(paths, cache)
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 1
    second.resolve().write_bytes(data)
    report = repair_catalog(paths)
    assert report.brought_back == {NODE: (1, 1)}
    assert any("part-00001.arrow is corrupt" in problem for problem in report.problems)
    assert not first.is_symlink() and second.is_symlink() and second.read_bytes() == data


def test_a_disk_that_is_away_is_named_and_backups_take_its_place(
    paths: Paths, source: Path, tmp_path: Path, alone: Context
) -> None:
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=2, backups=1)
    whole = read(alone, seed=1)
    root = set_second_path(paths, tmp_path / "slow")
    move_there(paths, root, cache)
    (tmp_path / "slow").rename(tmp_path / "away")
    assert read(alone, seed=1) == whole
    report = repair_catalog(paths)
    assert report.brought_back == {NODE: (0, 2)}
    assert any(f"{root} of node-0, which isn't" in problem for problem in report.problems)
    assert all(check.repaired for check in scrub_cache(paths, cache, repair=True) if check.node == NODE)
    check_whole(paths, cache)
    assert repair_catalog(paths).brought_back == {NODE: (0, 0)} and find_second_paths(paths) == {}


def test_versions_that_share_files_share_them_in_the_store(
    paths: Paths, cache: CacheSpec, root: Path, tmp_path: Path
) -> None:
    """An earlier insitu gave what was appended to further names on the second path, too."""
    np.save(tmp_path / "more.npy", np.full((10, 2), 7))
    Catalog(paths).pin("a/b", 1, "job")
    (new,) = import_cache(paths, "a/b", [str(tmp_path / "more.npy")], append=True)
    for old, path in zip(files_of(paths, cache), files_of(paths, new), strict=False):
        place = root / path.relative_to(paths.node(NODE))
        place.parent.mkdir(exist_ok=True)
        os.link(old.resolve(), place)
        path.unlink()
        path.symlink_to(place)
    used = measure_store(paths, NODE).used
    set_quotas(paths, [NODE], quota=used + cache.bytes + 10_000)  # once, not twice
    assert repair_catalog(paths).brought_back == {NODE: (4, 0)}
    assert os.path.samefile(files_of(paths, cache)[1], files_of(paths, new)[1])
    check_whole(paths, cache)
    check_whole(paths, new)


def test_rows_are_appended_and_the_files_come_into_the_store(
    paths: Paths, cache: CacheSpec, root: Path, tmp_path: Path, alone: Context
) -> None:
    np.save(tmp_path / "more.npy", np.full((10, 2), 7))
    set_quotas(paths, [NODE], quota=measure_store(paths, NODE).used + cache.bytes // 2)
    done: list[int] = []
    with pytest.raises(StorageFull, match="insitu delete CACHE"):
        import_cache(
            paths,
            "a/b",
            [str(tmp_path / "more.npy")],
            append=True,
            progress=lambda rows, *_: done.append(rows),
        )
    assert not done  # nothing was read for nothing
    set_quotas(paths, [NODE], quota=None)
    (new,) = import_cache(paths, "a/b", [str(tmp_path / "more.npy")], append=True)
    assert not any(path.is_symlink() for path in files_of(paths, new))
    check_whole(paths, new)
    assert sum(len(rows) for rows in read(alone)) == ROWS + 10
    assert repair_catalog(paths).brought_back == {NODE: (0, 0)} and not root.exists()
    check_whole(paths, new)


def test_a_scrub_repairs_a_copy_in_the_store(paths: Paths, source: Path, tmp_path: Path) -> None:
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=2, backups=1)
    root = set_second_path(paths, tmp_path / "slow")
    first, _ = move_there(paths, root, cache)
    cut = first.read_bytes()[:-1]
    place = first.resolve()
    place.write_bytes(cut)
    assert scrub_cache(paths, cache, repair=True)[0].repaired
    assert not first.is_symlink() and place.read_bytes() == cut
    check_whole(paths, cache)


def test_what_deleted_caches_left_there_goes_with_a_repair_or_all(
    paths: Paths, cache: CacheSpec, root: Path
) -> None:
    delete_cache(paths, "a/b")
    assert len(list(root.rglob("*.arrow"))) == 2
    assert repair_catalog(paths).brought_back == {NODE: (0, 0)}
    assert not root.exists() and find_second_paths(paths) == {}


def test_what_a_link_was_lost_of_stays(paths: Paths, cache: CacheSpec, root: Path) -> None:
    first, _ = files_of(paths, cache)
    place = first.resolve()
    first.unlink()
    assert repair_catalog(paths).brought_back == {NODE: (1, 0)}
    assert place.exists() and find_second_paths(paths) == {NODE: root}


def test_down_removes_what_lies_there(paths: Paths, root: Path) -> None:
    take_down(paths, force=True)
    assert not root.exists() and root.parent.exists()


@pytest.fixture
def private(tmp_path: Path, cache: CacheSpec, paths: Paths) -> Path:
    """A folder of the victim with files that are named as partitions are, with their bytes."""
    folder = tmp_path / "private"
    folder.mkdir()
    for path in files_of(paths, cache):
        shutil.copy2(path, folder / path.name)
    return folder


@pytest.mark.parametrize("swapped", ["file", "folder", "outside", "other"])
def test_links_on_a_second_path_are_not_followed(
    swapped: str, paths: Paths, cache: CacheSpec, root: Path, private: Path
) -> None:
    """Members of a shared home write there, too."""
    path = files_of(paths, cache)[0]
    place = root / path.relative_to(paths.node(NODE))
    if swapped == "file":
        place.unlink()
        place.symlink_to(private / path.name)
    elif swapped == "folder":
        place.parent.rename(place.parent.with_name("v9"))
        place.parent.symlink_to(private)
    else:
        path.unlink()
        path.symlink_to(private / path.name if swapped == "outside" else place.with_name("part-00001.arrow"))
    report = repair_catalog(paths)
    assert path.is_symlink()
    assert len(list(private.iterdir())) == 2, "nothing is removed that they lead to"
    left = {"file": 1, "folder": 2, "outside": 0, "other": 1}[swapped]
    assert report.brought_back == {NODE: (2 - left - (swapped == "outside"), left)}


def test_a_second_path_that_is_a_link_is_not_emptied(
    paths: Paths, cache: CacheSpec, root: Path, private: Path
) -> None:
    delete_cache(paths, "a/b")
    root.rename(root.with_name("away"))
    root.symlink_to(private)
    repair_catalog(paths)
    assert len(list(private.iterdir())) == 2


@needs_root
def test_what_another_member_has_moved_comes_back(paths: Paths, cache: CacheSpec, root: Path) -> None:
    for path in files_of(paths, cache):
        os.chown(path, NOBODY, -1, follow_symlinks=False)
    assert repair_catalog(paths).brought_back == {NODE: (2, 0)}
    check_whole(paths, cache)


@pytest.mark.parametrize("is_link", [True, False])
def test_rows_are_not_appended_to_partitions_that_are_away(
    is_link: bool, paths: Paths, cache: CacheSpec, tmp_path: Path, source: Path
) -> None:
    slow = tmp_path / "slow"
    if is_link:
        move_there(paths, set_second_path(paths, slow), cache)
        slow.rename(slow.with_name("away"))
    else:
        files_of(paths, cache)[1].unlink()
    done: list[int] = []
    where = rf"can't be found at {slow}/.*on the second path" if is_link else "part-00001.arrow is corrupt"
    with pytest.raises(CorruptPartition, match=where):
        import_cache(
            paths, cache.name, [str(source)], append=True, progress=lambda rows, *_: done.append(rows)
        )
    assert not done  # nothing was read for nothing
    assert Catalog(paths).get(cache.name) == cache
