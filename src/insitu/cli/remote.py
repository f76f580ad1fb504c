"""The agents that a command needs, where partitions lie on other hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.paths import Paths

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores
    from insitu.spec import CacheSpec


def find_remote(paths: Paths, cache: CacheSpec) -> RemoteStores | None:
    """Return the agents, where partitions of a cache lie on other hosts. Raises ClusterError."""
    from insitu.cluster import find_stores

    owners = {owner for info in cache.partitions for owner in info.owners}
    return None if all(paths.node(owner).exists() for owner in owners) else find_stores(paths)
