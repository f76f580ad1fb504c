"""What a store says of the versions that it holds."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.base.disk.durable import seal, unseal
from insitu.base.errors import CorruptManifest
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid import Catalog, bring_up, import_cache
from insitu.grid.catalog.manifests import (
    add_to_manifest,
    commit_manifests,
    find_unknown_versions,
    find_versions,
    next_version,
    prepare_manifest,
    read_manifest,
)
from insitu.grid.catalog.orphaned_imports import sweep
from insitu.grid.catalog.store_identity import read_store_id

A = NodeId("node-0")


def test_each_store_says_what_it_holds(paths: Paths, source: Path):
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a/b", [str(source)], partitions=3, backups=1)
    (split,) = import_cache(paths, "c", [str(source)], partitions=3)
    for node, held in ((A, (0, 2)), (NodeId("node-1"), (1,))):
        path = paths.manifest(node, "c", 1)
        manifest = read_manifest(path)
        assert (manifest.cache, manifest.held, manifest.state) == (split, held, "committed")
        assert manifest.store == read_store_id(paths, node)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_manifest(paths.manifest(node, "a/b", 1)).held == (0, 1, 2)
        held_in_file = unseal(path.read_bytes())["partitions"]
        assert held_in_file[0].items() >= {"bytes": split.partitions[held[0]].bytes}.items()
    found = [(place.name, place.version, place.node) for place in find_versions(paths)]
    assert found == [(name, 1, node) for name in ("a/b", "c") for node in ("node-0", "node-1")]
    assert cache.version == 1 and next_version(paths, Catalog(paths), "c") == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "format", "held", "state", "store", "list"])
def test_damage_is_named(damage: str, paths: Paths, source: Path):
    import_cache(paths, "a", [str(source)], partitions=2)
    path = paths.manifest(A, "a", 1)
    data = path.read_bytes()
    state = unseal(data)
    damaged = {
        "cut": data[:-10],
        "flipped": data.replace(b"committed", b"commitled"),
        "empty": b"",
        "format": seal({**state, "format": 2}),
        "held": seal({**state, "partitions": [{**state["partitions"][0], "bytes": 1}]}),
        "state": seal({**state, "state": "new"}),
        "store": seal({**state, "store": "../x"}),
        "list": json.dumps([1]).encode(),
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(CorruptManifest, match=r"manifest\.json is damaged \("):
        read_manifest(path)


def test_a_version_stands_although_its_manifest_cannot_be_marked(
    paths: Paths, source: Path, caplog: pytest.LogCaptureFixture
):
    (cache,) = import_cache(paths, "a", [str(source)], partitions=2)
    paths.manifest(A, "a", 1).unlink()
    with caplog.at_level(logging.WARNING):
        commit_manifests(paths, [cache])
    assert "can't be marked as published" in caplog.text and "`insitu repair`" in caplog.text


def test_what_comes_from_other_nodes_is_added(paths: Paths, source: Path, caplog: pytest.LogCaptureFixture):
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a", [str(source)], partitions=4)
    other = NodeId("node-7")
    paths.version(other, "a", 1).mkdir(parents=True)
    for partition in (3, 0, 3):
        add_to_manifest(paths, other, cache, partition)
    manifest = read_manifest(paths.manifest(other, "a", 1))
    assert manifest.held == (0, 3) and manifest.store == read_store_id(paths, other)
    add_to_manifest(paths, A, cache, 1)
    assert read_manifest(paths.manifest(A, "a", 1)).held == (0, 1, 2)
    paths.manifest(A, "a", 1).write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        add_to_manifest(paths, A, cache, 3)
    assert "`insitu repair` writes it again" in caplog.text


def test_only_what_nobody_needs_is_swept(paths: Paths, source: Path):
    """A lost catalogue must not be the reason that data is removed."""
    (cache,) = import_cache(paths, "a", [str(source)], partitions=2)
    later = replace(cache, version=7)
    folder = paths.version(A, "a", 7)
    paths.version(A, "a", 1).rename(folder)
    prepare_manifest(paths, A, later, paths.manifest(A, "a", 7))
    paths.catalog.rename(paths.home / "away")
    sweep(paths)
    assert folder.exists(), "without a catalogue it may have been published"
    (paths.home / "away").rename(paths.catalog)
    commit_manifests(paths, [later])
    sweep(paths)
    assert folder.exists() and find_unknown_versions(paths) == [("a", 7)]
    paths.manifest(A, "a", 7).write_bytes(b"damaged")
    sweep(paths)
    assert folder.exists() and next_version(paths, Catalog(paths), "a") == 8
    prepare_manifest(paths, A, later, paths.manifest(A, "a", 7))
    sweep(paths)
    assert not folder.exists(), "an import that died before it was published"
    paths.version(A, "a", 0).mkdir()
    sweep(paths)
    assert not paths.version(A, "a", 0).exists(), "the catalogue has a later one"
