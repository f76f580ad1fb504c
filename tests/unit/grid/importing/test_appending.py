"""Versions that share the partitions of the one before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_user import NOBODY, needs_root

from insitu.base.errors import CacheBusy, GridError, InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid import Catalog, bring_up, import_cache, sweep
from insitu.grid.partitions import Partition, file_checksum


def save(folder: Path, name: str, start: int, stop: int) -> str:
    np.save(folder / f"{name}.npy", np.arange(start, stop))
    return str(folder / f"{name}.npy")


def rows_of(paths: Paths, cache: CacheSpec, name: str = "x") -> list[Any]:
    """Return all values of a column, sorted, from every copy, each verified."""
    found = []
    for info in cache.partitions:
        for owner in info.owners:
            path = paths.partition(owner, cache.name, cache.version, info.index)
            assert file_checksum(path) == info.checksum
            partition = Partition(path, cache.columns, info.rows, cache.block_rows)
        found += partition.values[name].slice(0, info.rows).tolist()
    return sorted(found)


def test_a_version_has_the_old_partitions_and_new_ones(paths: Paths, tmp_path: Path) -> None:
    bring_up(paths, 2)
    (old,) = import_cache(paths, "a", [save(tmp_path, "old", 0, 500)], backups=1)
    (new,) = import_cache(paths, "a", [save(tmp_path, "new", 500, 600)], append=True)
    assert new == Catalog(paths).get("a") and (new.version, new.rows, new.backups) == (2, 600, 1)
    assert new.partitions[:8] == old.partitions and new.block_rows == old.block_rows
    # One for each node: appending often makes no cache of crumbs.
    assert len(new.partitions) == 10 and [p.owners[0] for p in new.partitions[8:]] == ["node-0", "node-1"]
    assert rows_of(paths, new) == list(range(600))
    assert not paths.version("node-0", "a", 1).exists() and not list(paths.staging.iterdir())


def test_files_are_shared_and_each_version_is_dropped_alone(paths: Paths, tmp_path: Path) -> None:
    (old,) = import_cache(paths, "a", [save(tmp_path, "old", 0, 500)])
    Catalog(paths).pin("a", 1, "job")
    (new,) = import_cache(paths, "a", [save(tmp_path, "new", 500, 600)], append=True)
    files = [paths.partition("node-0", "a", version, 3) for version in (1, 2)]
    assert os.path.samefile(*files)
    sweep(paths)
    assert rows_of(paths, old) == list(range(500)) and rows_of(paths, new) == list(range(600))
    Catalog(paths).unpin("job")
    assert not files[0].exists() and rows_of(paths, new) == list(range(600))


def test_where_files_cannot_be_linked_they_are_copied(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_cache(paths, "a", [save(tmp_path, "old", 0, 500)])

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr("insitu.grid.importing.appending.os.link", refuse)
    (new,) = import_cache(paths, "a", [save(tmp_path, "new", 500, 600)], append=True, partitions=3)
    assert len(new.partitions) == 11 and rows_of(paths, new) == list(range(600))


def test_what_was_verified_is_not_read_again(paths: Paths, tmp_path: Path) -> None:
    (old,) = import_cache(paths, "a", [save(tmp_path, "old", 0, 500)])
    for info in old.partitions:
        paths.verified("node-0", "a", 1, info.index).write_text("{}")
    import_cache(paths, "a", [save(tmp_path, "new", 500, 600)], append=True)
    assert all(paths.verified("node-0", "a", 2, info.index).read_text() == "{}" for info in old.partitions)


def test_classes_keep_their_numbers_and_new_ones_follow(paths: Paths, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        save(tmp_path, name, 0, 10)
    import_cache(paths, "a", [str(tmp_path)], label_from_filename=True)
    more = tmp_path / "more"
    more.mkdir()
    for name in ("ant", "dog"):
        save(more, name, 0, 10)
    (new,) = import_cache(paths, "a", [str(more)], append=True)
    assert new.labels == ("cat", "dog", "ant")
    assert rows_of(paths, new, "label") == [0] * 10 + [1] * 20 + [2] * 10


def test_whole_numbers_are_appended_to_other_ones(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("v\n1.5\n")
    (tmp_path / "new.csv").write_text("v\n2\n")
    import_cache(paths, "a", [str(tmp_path / "old.csv")])
    (new,) = import_cache(paths, "a", [str(tmp_path / "new.csv")], append=True)
    assert rows_of(paths, new, "v") == [1.5, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"overwrite": True},
            "--append takes all but the rows.*Received: --overwrite. Leave it",
        ),
        ({"key": "x", "split": {"a": 1.0}}, "Received: --split and --key. Leave them"),
        ({"label_from_filename": True}, "Received: --label-from-filename"),
        ({"backups": 1}, "Received: --backups"),
        ({"partitions": (1 << 16) - 7}, "at most 65536 partitions. Received: 65529 more for one of 8"),
    ],
)
def test_options_that_the_cache_decides_are_refused(
    options: dict[str, Any], message: str, paths: Paths, tmp_path: Path
) -> None:
    source = save(tmp_path, "old", 0, 500)
    import_cache(paths, "a", [source])
    with pytest.raises(InputError, match=message):
        import_cache(paths, "a", [source], append=True, **options)
    assert Catalog(paths).get("a").version == 1


def test_rows_with_keys_and_other_columns_are_refused(paths: Paths, tmp_path: Path) -> None:
    source = save(tmp_path, "old", 0, 500)
    import_cache(paths, "keyed", [source], key="x")
    with pytest.raises(InputError, match=r"rows with equal keys belong together. Received: .*--key x"):
        import_cache(paths, "keyed", [source], append=True)
    import_cache(paths, "a", [source])
    np.save(tmp_path / "other.npy", np.zeros(5, np.float32))
    with pytest.raises(SourceError, match=r"the columns of the cache: x int64. Received: x float32"):
        import_cache(paths, "a", [str(tmp_path / "other.npy")], append=True)


def test_a_version_that_came_between_is_not_lost(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path, "old", 0, 500)
    import_cache(paths, "a", [source])
    from insitu.grid.importing import importer

    original = importer.check_key

    def import_between(*arguments: Any) -> None:
        monkeypatch.setattr(importer, "check_key", original)
        import_cache(paths, "a", [source], append=True)

    monkeypatch.setattr(importer, "check_key", import_between)
    with pytest.raises(CacheBusy, match="made version 2 of a since"):
        import_cache(paths, "a", [source], append=True)
    assert Catalog(paths).get("a").rows == 1000


@needs_root
def test_what_a_link_of_others_leads_to_is_not_appended(paths: Paths, tmp_path: Path) -> None:
    """It would have been in the shared store then, for all members to read."""
    import_cache(paths, "a", [save(tmp_path, "old", 0, 500)])
    path = paths.partition("node-0", "a", 1, 0)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * path.stat().st_size)
    path.unlink()
    path.symlink_to(secret)
    os.chown(path, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(GridError, match=rf"user {NOBODY} has made a link to .*secret.*insitu repair"):
        import_cache(paths, "a", [save(tmp_path, "new", 500, 600)], append=True)
    assert secret.stat().st_nlink == 1
