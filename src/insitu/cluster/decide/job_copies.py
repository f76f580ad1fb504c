"""Decides which hosts keep a copy of a job, and from which copy a job resumes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from insitu.base.spec import NodeId

COPIES = 2
"""Hosts that keep a copy of a job while it runs."""


@dataclass(frozen=True, slots=True, order=True)
class CopyVersion:
    """How new a copy of a job is; the newer one is greater."""

    #: How often the job had been brought to another machine.
    term: int
    #: The last entry of its journal.
    sequence: int


def choose_copy_holders(
    candidates: Sequence[NodeId], holders: Collection[NodeId], count: int = COPIES
) -> tuple[NodeId, ...]:
    """Return the hosts that keep a copy from now on: those that have one already come first."""
    staying = [node for node in candidates if node in holders]
    return tuple([*staying, *(node for node in candidates if node not in holders)][:count])


def choose_newest_copy(copies: Mapping[NodeId, CopyVersion]) -> NodeId | None:
    """Return the node with the newest copy; of several the first by name. None if there is none."""
    return min(copies, key=lambda node: (-copies[node].term, -copies[node].sequence, node), default=None)
