"""The list of agents that the head keeps in its home, for processes there that don't ask the head."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict

from insitu.base.disk.access import owner_file_mode
from insitu.base.disk.durable import replace_file, seal, unseal
from insitu.base.disk.guarded_paths import read_guarded
from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Member, Membership, membership
from insitu.cluster.wire.messages import parse_members

logger = logging.getLogger("insitu")


def read_saved_members(paths: Paths) -> dict[NodeId, Member]:
    """Return the agents as the head has seen them last; none if there is no head yet.

    Raises ClusterError if the list can't be read.
    """
    try:
        return parse_members(unseal(read_guarded(paths.home, paths.members)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, InsituError) as error:
        raise ClusterError(f"the list of nodes in {paths.members} can't be read: {error}") from error


def read_kept_members(paths: Paths) -> dict[NodeId, Member]:
    """Return the agents as the head has left them, or as it has said them to an agent of this home; none
    where the list can't be read."""
    try:
        return read_saved_members(paths)
    except ClusterError:
        return {}


def save_members(paths: Paths, members: Mapping[NodeId, Member], *, sync: bool) -> None:
    """Keep the agents for processes of this home. Raises OSError."""
    data = seal([asdict(member) for _, member in sorted(members.items())])
    replace_file(paths.members, data, sync=sync, mode=owner_file_mode(paths.home))


def resume_members(paths: Paths, empty: Membership) -> Membership:
    """Return the membership that the head before has saved. A file that can't be read counts as none."""
    try:
        members = read_saved_members(paths)
    except ClusterError as error:
        logger.warning("%s; it is made again", error)
        return empty
    return membership.resume_membership(Membership(empty.versions, members), time.monotonic())
