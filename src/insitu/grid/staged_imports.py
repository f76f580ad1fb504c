"""What an agent does with its store for an import that runs on the machine of the head.

Partitions arrive in the staged folder of the import. `prepare_version` gives them their place in the store,
while the catalogue doesn't name the version yet. The folder in staging stays, with a file that names the
version, until the import has ended well or not. So it is known what belongs to an import that has died.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from insitu.access import apply_modes, file_mode, make_folder
from insitu.durable import replace_file, sync_folder
from insitu.errors import CorruptManifest, GridError
from insitu.grid.appending import share_partitions
from insitu.grid.leftovers import read_prepared
from insitu.grid.manifests import commit_manifest, prepare_manifest, read_manifest
from insitu.grid.verification import check_size, record_written
from insitu.paths import Paths
from insitu.spec import CacheSpec, NodeId


def prepare_version(paths: Paths, node: NodeId, cache: CacheSpec, token: str, base: CacheSpec | None) -> int:
    """Put what has arrived of a version into the store of `node`, where nobody reads it yet.

    `base` is the version whose partitions it shares, if any. All partitions that `node` owns must be there;
    new ones were verified as they came. Returns their bytes. Raises GridError, OSError.
    """
    staged, target = paths.staged(cache.name, token), paths.version(node, cache.name, cache.version)
    held = [info for info in cache.partitions if node in info.owners]
    if target.exists():
        if read_prepared(staged) == cache.version:
            return sum(info.bytes for info in held)  # the answer to the first request was lost
        raise GridError(
            f"A new version has a number of its own. Received: {cache.name} version {cache.version}, which "
            f"lies in the store of {node} already. Import again"
        )
    make_folder(paths.home, staged.store(node))
    if base is not None:
        share_partitions(paths, base, staged, cache.version, [node])
    for info in held:
        check_size(staged.partition(node, info.index), info)
    apply_modes(paths.home, staged.store(node))
    prepare_manifest(paths, node, cache, staged.manifest(node))
    sync_folder(staged.store(node))
    replace_file(staged.prepared, f"{cache.version}\n".encode(), sync=True, mode=file_mode(paths.home))
    make_folder(paths.home, target.parent)
    staged.store(node).rename(target)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)
    shared = 0 if base is None else len(base.partitions)
    for info in held:
        if info.index >= shared:
            key = (node, cache.name, cache.version, info.index)
            record_written(paths.partition(*key), info, paths.verified(*key))
    return sum(info.bytes for info in held)


def end_import(paths: Paths, node: NodeId, cache: str, token: str, *, published: bool) -> None:
    """Mark what an import has brought as published, or remove it. Nothing is done a second time.

    Raises OSError, and CorruptManifest where the version can't be marked.
    """
    staged = paths.staged(cache, token)
    version = read_prepared(staged)
    if version is not None:
        manifest = paths.manifest(node, cache, version)
        if published:
            commit_manifest(paths, manifest)
        elif _is_prepared(manifest):
            shutil.rmtree(manifest.parent)
            with contextlib.suppress(OSError):
                manifest.parent.parent.rmdir()
    shutil.rmtree(staged.root, ignore_errors=True)


def _is_prepared(manifest: Path) -> bool:
    try:
        return read_manifest(manifest).state == "prepared"
    except CorruptManifest:
        return False
