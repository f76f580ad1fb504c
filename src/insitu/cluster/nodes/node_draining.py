"""Asks the head to have a node leave the cluster, or to keep it."""

from __future__ import annotations

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.wire import ask_head, list_agents, read_head, read_token

_ANSWER_SECONDS = 10.0


def drain_node(paths: Paths, node: NodeId, seconds: float) -> str:
    """Have a node leave within `seconds`: its tasks and its data move to others. Returns the state of its
    agent. One that is "lost" has left as soon as others have copies of all that it had.

    Raises InputError if it isn't a node of the cluster, no other one stays, or the home belongs to no
    cluster; ClusterError if no head answers.
    """
    return _ask(paths, node, seconds)


def cancel_draining(paths: Paths, node: NodeId) -> None:
    """Keep a node that was to leave. Data that has moved isn't moved back. Raises as `drain_node`."""
    _ask(paths, node, None)


def find_own_node(paths: Paths) -> NodeId:
    """Return the node of the agent in this home. Raises InputError if there isn't just one."""
    found = sorted(list_agents(paths))
    if len(found) != 1:
        raise InputError(
            f"Without NODE, the node of this home's agent is meant. Received: {len(found)} agents in "
            f"{paths.home}. Name the node; `insitu nodes` lists them"
        )
    return found[0]


def ask_to_drain(address: str, token: str, node: NodeId, seconds: float | None) -> str:
    """Have the head at this address drain a node within `seconds`, or keep it (None). Returns the state of
    its agent. Raises as `drain_node`."""
    message = {"do": "drain", "node": node, "seconds": seconds or 0.0, "cancel": seconds is None}
    answer = ask_head(address, token, message, _ANSWER_SECONDS)
    if "refused" in answer:
        raise InputError(str(answer["refused"]))
    return str(answer.get("state", ""))


def _ask(paths: Paths, node: NodeId, seconds: float | None) -> str:
    record = read_head(paths)
    addresses = [record.address] if record is not None else [a.head for a in list_agents(paths).values()]
    if not addresses or not addresses[0]:
        raise InputError(
            f"Nodes of a cluster of hosts can leave. Received: {paths.home}, which belongs to none. `insitu "
            f"up --hosts FILE` makes one"
        )
    return ask_to_drain(addresses[0], read_token(paths), node, seconds)
