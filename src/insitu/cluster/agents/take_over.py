"""Makes the home of an agent that of the head, where the machine of the head is lost.

Agents are asked by the servers of their stores, so nothing has to be started on their hosts. Most of them
must obey, so that two can't take over at the same time; see `decide/fencing.py`. The new head has the
cluster's identity, the token and the catalogue that this agent has a copy of.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from insitu.cluster.agents.addresses import choose_head_address, resolve_interface
from insitu.cluster.agents.connection import ask_head
from insitu.cluster.agents.head_starting import start_head
from insitu.cluster.agents.known_agents import KnownAgents, open_agents
from insitu.cluster.agents.launching import Outcome
from insitu.cluster.agents.node_list import ask_for_nodes
from insitu.cluster.agents.records import (
    AgentRecord,
    change_head,
    check_record_owner,
    is_locked,
    list_agents,
    read_head,
    read_token,
)
from insitu.cluster.agents.task_servers import end_servers
from insitu.cluster.decide import (
    AgentView,
    choose_next_epoch,
    find_missing_majority,
    find_obstacle_to_taking_over,
    membership,
    taking_over,
)
from insitu.errors import ClusterError, InputError
from insitu.grid import adopt_catalog_copy
from insitu.paths import Paths
from insitu.ports import format_address, hold_port
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
_ASK_SECONDS = 5.0
_LOST_SECONDS = membership.LOST_SECONDS + 5.0
"""Seconds in which agents notice that their head has lost its power."""
_JOIN_SECONDS = 30.0
_POLL_SECONDS = 0.5

Report = Callable[[Outcome], None]


class NotNow(ClusterError):
    """This node doesn't take over now, as the other agents have answered."""

    def __init__(self, verdict: taking_over.Verdict) -> None:
        super().__init__(verdict.obstacle or f"other nodes come first, for {verdict.wait:g} s")
        #: What was decided.
        self.verdict = verdict


def take_over_head(paths: Paths, interface: str, port: int, report: Report) -> tuple[str, list[Outcome]]:
    """Start a head in this home of an agent, which the others obey from now on: somebody has said so.

    Returns its address, and what came of each agent that is known. `interface` and `port` as for
    `bring_up_hosts`. Raises InputError where this home or the cluster has a head that lives, ClusterError
    where most agents can't be reached.
    """
    check_record_owner(paths)
    node, record = _find_agent(paths)
    _check_head_is_lost(paths, record)
    with open_agents(paths, record.cluster, read_token(paths), _ASK_SECONDS) as agents:
        views = _wait_until_lost(agents)
        chosen = _Chosen(node, record, views, "`insitu up --take-over` was given there")
        address, obeying = _lead(paths, agents, chosen, interface, port)
        return address, _report(agents, _wait_for_agents(paths, address, obeying), report)


def take_over_if_due(paths: Paths, after: float, overdue: float) -> str:
    """Start a head in this home of an agent, where most agents have been without one for `after` seconds and
    it is this node's turn. Returns its address.

    `overdue`: seconds beyond `after` for which this node has had none. Raises NotNow where it isn't to be
    done now, and as `take_over_head`.
    """
    check_record_owner(paths)
    node, record = _find_agent(paths)
    try:
        _check_head_is_lost(paths, record)
    except InputError as error:  # it lets this agent in no more, or not yet
        raise NotNow(taking_over.Verdict(error.message)) from None
    with open_agents(paths, record.cluster, read_token(paths), _ASK_SECONDS) as agents:
        views = agents.look()
        verdict = taking_over.judge(agents.members, views, node, after, overdue)
        if verdict.obstacle or verdict.wait:
            raise NotNow(verdict)
        without = sum(view.without_head >= after for view in views.values())
        why = f"{without} of {len(agents.members)} agents had been without a head for {after:g} s"
        logger.warning("%s, so this node takes over from the head at %s", why, record.head)
        return _lead(paths, agents, _Chosen(node, record, views, why, after), "", 0)[0]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The node that takes over."""

    #: Its name.
    node: NodeId
    #: What its agent has kept.
    record: AgentRecord
    #: What agents have seen.
    views: Mapping[NodeId, AgentView]
    #: Why it takes over; for people.
    why: str
    #: Seconds for which each agent must have been without a head to promise; 0: any.
    after: float = 0.0


def _lead(
    paths: Paths, agents: KnownAgents, chosen: _Chosen, interface: str, port: int
) -> tuple[str, set[NodeId]]:
    """Have most agents promise to obey, then start the head. Returns its address, and who has promised."""
    node, record = chosen.node, chosen.record
    epoch = choose_next_epoch(max([record.epoch, *(view.epoch for view in chosen.views.values())]))
    own = [member.facts.address for n, member in agents.members.items() if n == node]
    others = [m.facts.address for n, m in agents.members.items() if n != node and n in chosen.views]
    host = resolve_interface(interface) if interface else choose_head_address(others or own)
    port = port or _find_port(host)
    instance = os.urandom(16).hex()
    address = format_address(host, port)
    claim = {"address": address, "epoch": epoch, "instance": instance}
    obeying = agents.ask("obey_head", **claim, after=chosen.after)
    if why := find_missing_majority(agents.members, obeying):
        raise ClusterError(
            f"Most agents must obey a head that takes over. Received: {why}. "
            f"{'; '.join(agents.problems.values())}. Then run the same command again"
        )
    end_servers(paths, node)  # of jobs whose supervisor is lost; their folders here would look like jobs
    adopt_catalog_copy(paths)
    change_head(
        paths,
        **claim,
        cluster=record.cluster,
        take_over_after=record.take_over_after,
        taken_over={
            "node": node,
            "from": record.head,
            "at": time.time(),
            "why": chosen.why,
            "after": chosen.after,
            "agents": sorted(obeying),
        },
    )
    return start_head(paths, host, port, []), set(obeying)


def _find_agent(paths: Paths) -> tuple[NodeId, AgentRecord]:
    if read_head(paths) is not None:
        raise InputError(
            f"Another home than that of the head takes over. Received: {paths.home}, which is the head's. "
            f"`insitu up` with --hosts or --engine, as before, starts it again"
        )
    found = list_agents(paths)
    running = [node for node in found if is_locked(paths.agent_lock(node))]
    if len(running) != 1:
        raise InputError(
            f"The home of one agent that runs becomes the head's. Received: {paths.home} with "
            f"{len(running)} agent(s) that run. Run the command on the host of one, with its INSITU_HOME"
        )
    return running[0], found[running[0]]


def _check_head_is_lost(paths: Paths, record: AgentRecord) -> None:
    """Raise InputError where the head answers."""
    try:
        ask_head(record.head, read_token(paths), {"do": "nodes"}, _ASK_SECONDS, connect_seconds=_ASK_SECONDS)
    except ClusterError:
        return
    raise InputError(
        f"Another head takes over where the cluster has lost its own. Received: the head at {record.head}, "
        f"which answers. `insitu down` on its machine ends it, and all agents"
    )


def _wait_until_lost(agents: KnownAgents) -> dict[NodeId, AgentView]:
    """Return what agents have seen, once none of them is led. Raises ClusterError."""
    deadline = time.monotonic() + _LOST_SECONDS
    while True:
        views = agents.look()
        why = find_obstacle_to_taking_over(agents.members, views)
        if not why:
            return views
        if time.monotonic() > deadline or not any(view.is_led for view in views.values()):
            raise ClusterError(f"Another head can't take over now. Received: {why}")
        time.sleep(_POLL_SECONDS)


def _find_port(host: str) -> int:
    """Return a port of this machine that is free now."""
    with contextlib.closing(hold_port(host)) as held:
        return int(held.getsockname()[1])


def _wait_for_agents(paths: Paths, address: str, nodes: set[NodeId]) -> set[NodeId]:
    """Return those of these nodes that have joined the new head, all of them or after a while."""
    deadline = time.monotonic() + _JOIN_SECONDS
    joined: set[NodeId] = set()
    while not nodes <= joined and time.monotonic() < deadline:
        with contextlib.suppress(ClusterError):
            members = ask_for_nodes(address, read_token(paths))
            joined = {m.facts.node for m in members if m.state == "alive" and m.connection is not None}
        time.sleep(_POLL_SECONDS / 5)
    return joined


def _report(agents: KnownAgents, joined: set[NodeId], report: Report) -> list[Outcome]:
    outcomes = []
    for node, member in sorted(agents.members.items()):
        facts = member.facts
        serves = {"node": node, "address": format_address(facts.address, facts.port)}
        why = agents.problems.get(node, "it hasn't joined yet; `insitu nodes` shows when it does")
        found = Outcome(facts.host, serves) if node in joined else Outcome(facts.host, None, why)
        outcomes.append(found)
        report(outcomes[-1])
    return outcomes
