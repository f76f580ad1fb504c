"""Lays a store out as an earlier insitu left it that had moved partitions to a second path."""

from __future__ import annotations

from pathlib import Path

from insitu.base.disk.durable import seal
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.catalog.store_identity import make_store_id

NODE = NodeId("node-0")


def set_second_path(paths: Paths, folder: Path, node: NodeId = NODE, quota: int | None = None) -> Path:
    """Name `folder` in the settings of a store. Returns the store's folder there."""
    root = folder.resolve() / f"insitu-{make_store_id(paths, node)}"
    root.mkdir(parents=True, exist_ok=True)
    state = {"format": 1, "quota": quota, "tier": str(root), "file_memory": None}
    paths.store_settings(node).write_bytes(seal(state))
    paths.store_settings(node).chmod(0o600)
    return root


def move_there(paths: Paths, root: Path, cache: CacheSpec, node: NodeId = NODE) -> list[Path]:
    """Move the partitions of a cache, and leave links in their places. Returns the links."""
    links = []
    for info in cache.partitions:
        if node in info.owners:
            path = paths.partition(node, cache.name, cache.version, info.index)
            place = root / path.relative_to(paths.node(node))
            place.parent.mkdir(parents=True, exist_ok=True)
            path.rename(place)
            path.symlink_to(place)
            links.append(path)
    return links
