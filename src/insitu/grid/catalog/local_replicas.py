"""Which copies of partitions a process reads, and whether there is one in this home at all.

It loads nothing heavy: `insitu start` looks here before it makes a job.
"""

from __future__ import annotations

from collections.abc import Iterable

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.base.wording import format_count, inflect
from insitu.grid.catalog.store_identity import is_home_of_agent, list_nodes_with_stores


def find_copies(paths: Paths, cache: CacheSpec, index: int, node: NodeId | None) -> list[NodeId]:
    """Return the nodes whose copies of a partition are tried, the preferred one first.

    If no owner's copy is in this home, those count that were fetched into its other stores.
    """

    def is_here(other: NodeId) -> bool:
        return paths.partition(other, cache.name, cache.version, index).exists()

    owners = sorted(cache.partitions[index].owners, key=lambda owner: owner != node)
    if node is not None and node not in owners and is_here(node):
        return [node, *owners]
    if any(map(is_here, owners)):
        return owners
    fetched = [other for other in list_nodes_with_stores(paths) if other not in owners and is_here(other)]
    return [*fetched, *owners]


def is_store_here(paths: Paths, node: NodeId) -> bool:
    """Return whether the store of a node is in this home, with its disk mounted."""
    return paths.store_id(node).exists()


def should_lie_here(paths: Paths, node: NodeId) -> bool:
    """Return whether copies of a node are in this home, if nothing is wrong. Those of other hosts don't."""
    return paths.node(node).exists() or not (paths.head.exists() or is_home_of_agent(paths))


def find_missing_here(paths: Paths, cache: CacheSpec, indices: Iterable[int]) -> list[int]:
    """Return the partitions of which no store of this home has or should have a copy."""
    local = set(list_nodes_with_stores(paths))
    owned = [index for index in indices if not local & set(cache.partitions[index].owners)]
    return [index for index in owned if not local & set(find_copies(paths, cache, index, None))]


def check_here(paths: Paths, cache: CacheSpec, indices: Iterable[int]) -> None:
    """Raise GridError if partitions are on other hosts alone."""
    missing = find_missing_here(paths, cache, indices)
    if missing and (paths.head.exists() or is_home_of_agent(paths)):
        owners = sorted({owner for i in missing for owner in cache.partitions[i].owners})
        raise GridError(
            f"A process reads partitions that are on its own machine. Received: {cache.name} version "
            f"{cache.version}, of which {format_count(len(missing), 'partition')} "
            f"{inflect(len(missing), 'is', 'are')} on {', '.join(owners)} alone. "
            f"`insitu fetch {cache.name}` copies them to this machine"
        )
