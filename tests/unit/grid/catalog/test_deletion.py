"""Deleting a cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from foreign_user import NOBODY, needs_root

from insitu.base.errors import CacheBusy, InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.grid import Catalog, bring_up, delete_cache, find_unknown_versions, import_cache, sweep
from insitu.grid.catalog.files import cache_locks
from insitu.grid.catalog.manifests import read_manifest
from insitu.grid.catalog.store_identity import list_nodes_with_stores
from insitu.grid.maintenance.repair import repair_catalog


@pytest.fixture
def paths(home: Path, tmp_path: Path) -> Paths:
    """Two nodes with the caches a and b, each partition with a backup."""
    paths = Paths(home)
    bring_up(paths, 2)
    np.save(tmp_path / "a.npy", np.arange(100))
    for name in ("a", "b"):
        import_cache(paths, name, [str(tmp_path / "a.npy")], partitions=2, backups=1)
    return paths


def files_of(paths: Paths, name: str) -> list[Path]:
    return [p for node in ("node-0", "node-1") for p in paths.node(node).glob(f"{name}*/**/*") if p.is_file()]


def states_of(paths: Paths, name: str) -> set[str]:
    return {read_manifest(f).state for f in files_of(paths, name) if f.name == "manifest.json"}


def test_a_deleted_cache_leaves_nothing_and_others_stay(paths: Paths):
    size = sum(p.bytes for p in Catalog(paths).get("a").partitions)
    assert delete_cache(paths, "a") == 2 * size
    assert [cache.name for cache in Catalog(paths).stored()] == ["b"]
    assert not files_of(paths, "a") and files_of(paths, "b")
    assert Catalog(paths).placement("a", 1) == []
    assert find_unknown_versions(paths) == [] and not repair_catalog(paths).restored
    with pytest.raises(UnknownCache):
        delete_cache(paths, "a")


def test_a_cache_in_use_stays_as_it_was(paths: Paths):
    before = files_of(paths, "a")
    Catalog(paths).pin("a", 1, "digits-1")
    with pytest.raises(InputError, match="used by digits-1"):
        delete_cache(paths, "a")
    with cache_locks(paths, ["b"]), pytest.raises(CacheBusy):
        delete_cache(paths, "b")
    assert len(Catalog(paths).caches()) == 2 and files_of(paths, "a") == before


def test_a_job_that_begins_meanwhile_keeps_it(paths: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("insitu.grid.catalog.deletion._check_unused", lambda *_: None)
    Catalog(paths).pin("a", 1, "digits-1")
    with pytest.raises(InputError, match="digits-1 has begun"):
        delete_cache(paths, "a")
    assert states_of(paths, "a") == {"committed"}
    assert Catalog(paths).get("a").rows == 100


@pytest.mark.parametrize("dies_at", ["delete", "remove_files"])
def test_killed_in_between_it_stands_or_is_removed_later(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, dies_at: str
):
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    before = files_of(paths, "a")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Catalog, dies_at, die)
        patch.setattr("insitu.grid.catalog.deletion.commit_manifests", lambda *_: None)  # as a kill would
        delete_cache(paths, "a")
    assert files_of(paths, "a")
    sweep(paths)
    if dies_at == "delete":
        assert Catalog(paths).get("a").rows == 100 and files_of(paths, "a") == before
        repair_catalog(paths)
        assert states_of(paths, "a") == {"committed"}
    else:
        assert not files_of(paths, "a") and [c.name for c in Catalog(paths).stored()] == ["b"]


def test_a_later_cache_of_the_name_is_a_new_one(paths: Paths, tmp_path: Path):
    delete_cache(paths, "a")
    np.save(tmp_path / "c.npy", np.arange(7))
    import_cache(paths, "a", [str(tmp_path / "c.npy")])
    assert Catalog(paths).get("a").rows == 7


@needs_root
def test_what_links_of_others_in_a_store_lead_to_is_not_swept(paths: Paths, tmp_path: Path):
    """A version that the catalogue doesn't know is removed: any folder of the victim that is called `v1`."""
    victims = tmp_path / "photos"
    (victims / "v1").mkdir(parents=True)
    for _ in range(2):
        import_cache(paths, "photos", [str(tmp_path / "a.npy")], overwrite=True)
    (paths.nodes / "evil").mkdir()
    for link in (paths.nodes / "evil" / "photos", paths.nodes / "other"):
        link.symlink_to(victims if link.name == "photos" else tmp_path)
        os.chown(link, NOBODY, -1, follow_symlinks=False)
    sweep(paths)
    assert (victims / "v1").exists()
    assert "other" not in list_nodes_with_stores(paths)


@needs_root
def test_what_a_link_of_others_leads_to_is_not_removed_with_a_cache(paths: Paths, tmp_path: Path):
    (tmp_path / "mine" / "v1").mkdir(parents=True)
    store = paths.cache_store("node-0", "a")
    store.rename(tmp_path / "away")
    store.symlink_to(tmp_path / "mine")
    os.chown(store, NOBODY, -1, follow_symlinks=False)
    delete_cache(paths, "a")
    assert (tmp_path / "mine" / "v1").exists()
