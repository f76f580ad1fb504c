"""The stores of a cluster's agents, for commands that read, write or check their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from insitu.base.errors import ClusterError, GridError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member, find_cluster_number
from insitu.cluster.wire import (
    find_successor,
    is_locked,
    list_agents,
    read_head,
    read_kept_members,
    read_nodes,
    read_token,
)
from insitu.grid import read_store_id

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores


def find_stores(paths: Paths, silence: float | None = None) -> RemoteStores | None:
    """Return the stores of the agents that are alive now; None if the home belongs to no cluster.

    `silence`: seconds without a word after which an agent counts as lost; None: the usual time. Raises
    ClusterError if no head answers.
    """
    head = read_head(paths)
    if head is None and not list_agents(paths):
        return None
    runs = head is None or is_locked(paths.head_lock)
    if head and (head.replaced_by or not runs) and (address := find_successor(paths, head)):
        raise ClusterError(
            f"The head alone changes the catalogue. Received: {paths.home}, whose head the one at "
            f"{address} has replaced. Run the command on the machine of that head"
        )
    if not runs:
        raise ClusterError(
            f"The stores of a cluster are reached through its head. Received: {paths.home}, whose head "
            f"doesn't run. `insitu up --hosts FILE` starts it; `insitu down --force` deletes the cluster's "
            f"caches, and the home is one of this machine alone again"
        )
    members, _ = read_nodes(paths)
    return _open_stores(paths, [member for member in members if member.state == "alive"], silence)


def find_known_stores(paths: Paths) -> RemoteStores | None:
    """Return the stores of the agents that the head has named last, without asking it; None if the home
    belongs to no cluster. Raises InsituError."""
    members = [m for m in read_kept_members(paths).values() if m.state != "left"]
    return _open_stores(paths, members) if members else None


def _open_stores(paths: Paths, members: Sequence[Member], silence: float | None = None) -> RemoteStores:
    from insitu.grid.transfer import RemoteStores, ServerAddress  # loads Flight

    known = [member.facts for member in members]
    addresses = {each.node: ServerAddress(each.address, each.port, each.certificate) for each in known}
    here = [each.node for each in known if _read_id(paths, each.node) == each.store]
    leaving = [member.facts.node for member in members if member.leave_by is not None]
    options = {} if silence is None else {"silence": silence}
    head = read_head(paths)
    number = None if head is None else find_cluster_number(head.epoch)
    token = read_token(paths).encode()
    return RemoteStores(addresses, token, here=here, leaving=leaving, number=number, **options)


def find_owners(paths: Paths) -> RemoteStores | None:
    """Return the stores that an import in this home writes to; None: those of this machine alone.

    Raises ClusterError if another machine has the head, and if no head answers.
    """
    if read_head(paths) is None:
        for agent in list_agents(paths).values():
            raise ClusterError(
                f"The head alone changes the catalogue. Received: {paths.home}, the home of an agent. Run "
                f"the command on the machine of the head, which is at {agent.head}"
            )
    return find_stores(paths)


def _read_id(paths: Paths, node: NodeId) -> str | None:
    try:
        return read_store_id(paths, node)
    except GridError:
        return None
