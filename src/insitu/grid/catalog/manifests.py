"""The manifest of a version: what one store holds of it, in a file beside the data.

The catalogue says which versions there are. Should it be lost, the manifests say it again. An import writes
each store's manifest with the state `prepared` into the staged folder, so that it comes into the store with
the data by one rename. After the catalogue's transaction the state becomes `committed`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from insitu.base.disk.access import file_mode
from insitu.base.disk.durable import replace_file, seal, unseal
from insitu.base.errors import CorruptManifest, InputError
from insitu.base.paths import MANIFEST, Paths, cache_folder_name, cache_name_of_folder
from insitu.base.spec import CacheSpec, NodeId, PartitionInfo
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.store_identity import is_store_id, list_nodes_with_stores, make_store_id

logger = logging.getLogger("insitu")
FORMAT = 1

ManifestState = Literal["prepared", "committed"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one store of one version of a cache."""

    #: The version as it was published; its owners are those of that time.
    cache: CacheSpec
    #: The id of the store.
    store: str
    #: The partitions that the store holds, ascending.
    held: tuple[int, ...]
    #: `prepared` until the catalogue has the version.
    state: ManifestState

    def __post_init__(self) -> None:
        if self.state not in ("prepared", "committed") or not is_store_id(self.store):
            raise ValueError(f"it names the state {self.state!r} and the store {self.store!r}")
        if list(self.held) != sorted(set(self.held) & set(range(len(self.cache.partitions)))):
            raise ValueError(f"it holds the partitions {self.held} of {len(self.cache.partitions)}")

    def to_json(self) -> dict[str, Any]:
        held = [_describe(self.cache.partitions[index]) for index in self.held]
        spec = self.cache.to_json()
        return {"format": FORMAT, "state": self.state, "store": self.store, "partitions": held, "spec": spec}

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']}, this insitu knows {FORMAT}")
        cache = CacheSpec.from_json(data["spec"])
        held = tuple(int(partition["index"]) for partition in data["partitions"])
        manifest = cls(cache, str(data["store"]), held, data["state"])
        if data["partitions"] != [_describe(cache.partitions[index]) for index in held]:
            raise ValueError("it gives two sizes or checksums for a partition")
        return manifest


def _describe(partition: PartitionInfo) -> dict[str, Any]:
    return {"index": partition.index, "bytes": partition.bytes, "checksum": partition.checksum}


def write_manifest(home: Path, path: Path, manifest: Manifest) -> None:
    """Replace the manifest at `path`; the new one survives a power cut. Raises OSError."""
    replace_file(path, seal(manifest.to_json()), sync=True, mode=file_mode(home))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`. Raises CorruptManifest if it is missing or damaged."""
    try:
        return Manifest.from_json(unseal(path.read_bytes()))
    except OSError as error:
        raise CorruptManifest(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        why = "it isn't whole" if isinstance(error, json.JSONDecodeError) else error
        raise CorruptManifest(f"{path} is damaged ({why})") from error


def prepare_manifest(paths: Paths, node: NodeId, cache: CacheSpec, path: Path) -> None:
    """Write the manifest of what `node` holds of `cache` before it is published. Raises OSError."""
    held = tuple(p.index for p in cache.partitions if node in p.owners)
    write_manifest(paths.home, path, Manifest(cache, make_store_id(paths, node), held, "prepared"))


def commit_manifests(paths: Paths, versions: Iterable[CacheSpec]) -> None:
    """Mark the manifests of versions that the catalogue has now, of the stores in this home.

    A version stands without that. A manifest that can't be marked is a warning.
    """
    for cache in versions:
        for node in {owner for p in cache.partitions for owner in p.owners}:
            path = paths.manifest(node, cache.name, cache.version)
            if not path.parent.exists():
                continue  # the store is another host's
            try:
                commit_manifest(paths, path)
            except (OSError, CorruptManifest) as error:
                logger.warning("%s can't be marked as published (%s). `insitu repair` does it.", path, error)


def commit_manifest(paths: Paths, path: Path) -> None:
    """Mark one manifest as that of a published version. Raises OSError and CorruptManifest."""
    manifest = read_manifest(path)
    if manifest.state != "committed":
        write_manifest(paths.home, path, replace(manifest, state="committed"))


def withdraw_manifests(paths: Paths, versions: Iterable[CacheSpec]) -> None:
    """Mark the manifests of versions that are about to be deleted as those of versions that never were
    published. One that is missing or damaged is passed over. Raises OSError."""
    for cache in versions:
        for node in {owner for p in cache.partitions for owner in p.owners}:
            path = paths.manifest(node, cache.name, cache.version)
            with contextlib.suppress(CorruptManifest):
                write_manifest(paths.home, path, replace(read_manifest(path), state="prepared"))


def add_to_manifest(paths: Paths, node: NodeId, cache: CacheSpec, partition: int) -> None:
    """Note that `node` holds a partition of a published version, which has come from another node.

    A manifest that is damaged is left for `insitu repair`. Raises OSError.
    """
    path = paths.manifest(node, cache.name, cache.version)
    with manifest_lock(path.parent), _damage_logged():
        if not path.exists():
            old = Manifest(cache, make_store_id(paths, node), (), "committed")
        else:
            old = read_manifest(path)
        held = tuple(sorted({*old.held, partition}))
        write_manifest(paths.home, path, replace(old, held=held, state="committed"))


def remove_from_manifest(paths: Paths, node: NodeId, name: str, version: int, partition: int) -> None:
    """Note that `node` doesn't hold a partition any more. A manifest that is damaged is left for `insitu
    repair`. Raises OSError."""
    path = paths.manifest(node, name, version)
    with manifest_lock(path.parent), _damage_logged():
        old = read_manifest(path)
        held = tuple(index for index in old.held if index != partition)
        write_manifest(paths.home, path, replace(old, held=held))


@contextlib.contextmanager
def manifest_lock(folder: Path) -> Iterator[None]:
    """Keep others from changing the manifest in the folder of a version, and which copies are there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _damage_logged() -> Iterator[None]:
    try:
        yield
    except CorruptManifest as error:
        logger.warning("%s. `insitu repair` writes it again.", error)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The folder of a version in a store, whether the catalogue knows it or not."""

    #: The node of the store.
    node: NodeId
    #: The cache, by the folder's name.
    name: str
    #: The version, by the folder's name.
    version: int
    #: The folder.
    folder: Path

    @property
    def manifest(self) -> Path:
        return self.folder / MANIFEST


def find_versions(paths: Paths, cache: str | None = None) -> list[StoredVersion]:
    """Return the versions of `cache` (None: of all caches) whose folders are in the stores, in order."""
    found = []
    for node in list_nodes_with_stores(paths):
        for store in sorted(paths.node(node).iterdir()):
            name = cache_name_of_folder(store.name)
            if not store.is_dir() or cache not in (None, name) or not _is_cache_folder(store.name, name):
                continue
            for folder in store.iterdir():
                number = folder.name.removeprefix("v")
                if folder.name == f"v{number}" and number.isdecimal() and folder.is_dir():
                    found.append(StoredVersion(node, name, int(number), folder))
    return sorted(found, key=lambda version: (version.name, version.version, version.node))


def _is_cache_folder(folder: str, name: str) -> bool:
    try:
        return cache_folder_name(name) == folder
    except InputError:
        return False


def find_unknown_versions(paths: Paths) -> list[tuple[str, int]]:
    """Return (cache, version) of copies in the stores that the catalogue neither has nor has replaced."""
    catalog = Catalog(paths)
    stored = {(cache.name, cache.version) for cache in catalog.stored()}
    latest = {cache.name: cache.version for cache in catalog.caches()}
    found = {(place.name, place.version) for place in find_versions(paths)}
    return sorted((name, version) for name, version in found - stored if version > latest.get(name, 0))


def next_version(paths: Paths, catalog: Catalog, cache: str) -> int:
    """Return the number of the next version: above all that the catalogue has or has had, or that are in a
    store of this home."""
    known = [spec.version for spec in catalog.stored() if spec.name == cache]
    deleted = catalog.deleted().get(cache, 0)
    return max([next_stored_version(paths, cache), deleted + 1, *(version + 1 for version in known)])


def next_stored_version(paths: Paths, cache: str) -> int:
    """Return a number above those of all versions that are in a store of this home."""
    return max([0, *(found.version for found in find_versions(paths, cache))]) + 1


def last_published_version(paths: Paths, cache: str) -> int:
    """Return the highest version that a store of this home holds as published; 0 if there is none."""
    published = [0]
    for found in find_versions(paths, cache):
        with contextlib.suppress(CorruptManifest):
            if read_manifest(found.manifest).state == "committed":
                published.append(found.version)
    return max(published)


def is_leftover(paths: Paths, folder: Path, stored: Sequence[CacheSpec]) -> bool:
    """Return whether the version in `folder` can be removed: no reader needs it, nor does `insitu repair`.

    `stored` are the versions of its cache that the catalogue has. A version that was published is removed
    only if the catalogue has a later one: else the catalogue is an older copy, or a new one. Without a
    catalogue everything stays.
    """
    if folder.name in {f"v{spec.version}" for spec in stored} or not paths.catalog.exists():
        return False
    number = folder.name.removeprefix("v")
    if number.isdecimal() and int(number) < max((spec.version for spec in stored), default=0):
        return True
    try:
        return read_manifest(folder / MANIFEST).state == "prepared"
    except CorruptManifest:
        return False
