"""Decides which head agents follow, and which supervisor the servers of a job's hosts. Pure.

Each head, and each supervisor of a job, comes with a *claim*: a number that grows, and who has drawn it. Who
follows keeps the highest claim that it has accepted, on its disk, and refuses what is lower. Two claims with
the same number are of two that didn't know of each other: the one that came first is followed.

A cluster has a number, which grows when its head is replaced from another home: a person decides that. Each
start of a head takes the next epoch of that number. So a head that was replaced reaches the epochs of the
next one never, however often it starts again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

EPOCHS_OF_A_NUMBER = 1 << 20
"""Epochs that the heads of one home have: each start takes one."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim by which others follow a head, or a job's supervisor."""

    #: Grows with each change of who leads: the epoch of a head, the term of a job.
    number: int = 0
    #: Drawn by the claimant; it distinguishes two with the same number.
    instance: str = ""


@dataclass(frozen=True, slots=True)
class AgentView:
    """A host's knowledge of the head of one of its agents."""

    #: The cluster that the agent belongs to.
    cluster: str
    #: The address of the head that it follows.
    head: str
    #: The highest epoch of a head that it has accepted.
    epoch: int
    #: True: that head answers the host.
    head_answers: bool
    #: The URL of the etcd that holds the cluster's metadata; empty: the head's home holds it.
    metadata: str = ""


def may_accept(seen: Claim | None, asked: Claim) -> bool:
    """Return whether `asked` is accepted by who has accepted the claim `seen`; None: none yet."""
    return seen is None or asked == seen or asked.number > seen.number


def is_replaced(head: Claim, asked: Claim) -> bool:
    """Return whether a head was replaced by `asked`: its cluster has a higher number there. An agent that is
    connected to a head leaves it for no less, such as for a copy of its home."""
    return find_cluster_number(asked.number) > find_cluster_number(head.number)


def find_cluster_number(epoch: int) -> int:
    """Return how often the head of a cluster was replaced before this epoch."""
    return epoch // EPOCHS_OF_A_NUMBER


def choose_next_epoch(views: Collection[AgentView]) -> int:
    """Return the epoch below the first one of the next number, above all that these agents have accepted."""
    highest = max(view.epoch for view in views)
    return (find_cluster_number(highest) + 1) * EPOCHS_OF_A_NUMBER


def find_obstacle_to_replacing(views: Collection[AgentView]) -> str:
    """Return why the head that these agents follow can't be replaced; "" if it can."""
    if not views:
        return "no host with an agent of that cluster. See what each host says above"
    clusters = sorted({view.cluster[:8] for view in views})
    if len(clusters) > 1:
        return f"agents of clusters {', '.join(clusters)}. Leave the hosts of all but one out of the file"
    if in_etcd := sorted({view.metadata for view in views if view.metadata}):
        return (
            f"a cluster whose metadata is in {in_etcd[0]}, where an agent starts the next head by itself. If "
            f"none does, the agents' logs say why (agent-NODE.log in their INSITU_HOME)"
        )
    living = sorted({view.head for view in views if view.head_answers})
    if living:
        return (
            f"the head at {living[0]}, which answers. `insitu down` on its machine ends it, with its agents; "
            f"`insitu up --hosts FILE` there starts what doesn't run"
        )
    return ""
