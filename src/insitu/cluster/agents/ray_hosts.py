"""Brings up the head and an agent on each node of a Ray cluster, and takes them down."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from insitu._version import __version__
from insitu.cluster.agents.head_starting import start_head
from insitu.cluster.agents.hosts import (
    DownReport,
    Report,
    check_head_home,
    take_down_hosts,
)
from insitu.cluster.agents.launching import START_SECONDS, Outcome
from insitu.cluster.agents.node_list import read_nodes
from insitu.cluster.agents.ray_cluster import (
    RayCluster,
    connect_to_ray,
    find_gcs_obstacle,
    make_namespace,
)
from insitu.cluster.agents.ray_controller import AgentController, NodeReport
from insitu.cluster.agents.ray_holder import HolderSettings
from insitu.cluster.agents.records import HeadRecord, change_head, check_record_owner, make_token, read_head
from insitu.errors import ClusterError, InputError
from insitu.paths import Paths

_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.3
_PASSES = 2
"""After so many passes of the controller what it reports is younger than the question."""


@dataclass(frozen=True, slots=True)
class RayRequest:
    """What `insitu up --engine ray` was given."""

    #: "auto", or the address of the Ray cluster as host:port.
    address: str
    #: Interface or address of insitu's head; empty: the one that routes to the nodes.
    interface: str = ""
    #: The port of insitu's head; 0: that of the last time, else the system chooses.
    port: int = 0


def bring_up_ray(paths: Paths, request: RayRequest, report: Report) -> tuple[str, list[Outcome]]:
    """Start the head of this home, unless it runs, and an agent on each node of a Ray cluster.

    Nodes that join later get one, too. Returns the head's address, and what came of each node that is there.
    Raises InputError for what can't be tried at all, ClusterError where Ray or the head can't be reached.
    """
    check_record_owner(paths)
    check_head_home(paths)
    record = read_head(paths) or HeadRecord(secrets.token_hex(16))
    with connect_to_ray(request.address, make_namespace(record.cluster)) as ray:
        if record.ray and record.ray != ray.address:
            raise InputError(
                f"The agents of a head are on one Ray cluster. Received: {ray.address}, after {record.ray}. "
                f"End those with `insitu down` first"
            )
        token = make_token(paths)
        change_head(paths, cluster=record.cluster, ray=ray.address)
        nodes = [node for node in ray.list_nodes() if node.alive]
        address = start_head(paths, request.interface, request.port, [node.address for node in nodes])
        settings = HolderSettings(secrets.token_hex(8), address, __version__, token)
        return address, _wait_for_agents(ray, settings, report)


def _wait_for_agents(ray: RayCluster, settings: HolderSettings, report: Report) -> list[Outcome]:
    """Have a controller with these settings, and return what came of each node once that is known."""
    controller = ray.find_controller()
    if controller is not None and not ray.call(controller.fits, settings, seconds=_ANSWER_SECONDS):
        ray.end_controller()
        controller = None
    if controller is None:
        controller = ray.start_controller(AgentController, settings)
    first = ray.call(controller.start_again, seconds=_ANSWER_SECONDS)

    def ask() -> tuple[int, list[NodeReport]]:
        passes, nodes = ray.call(controller.report, seconds=_ANSWER_SECONDS)
        return int(passes), list(nodes)

    return collect_outcomes(ask, first + _PASSES, report, START_SECONDS)


def collect_outcomes(
    ask: Callable[[], tuple[int, list[NodeReport]]], passes: int, report: Report, seconds: float
) -> list[Outcome]:
    """Ask for reports until the agent of each node has joined or can't, or `seconds` have passed.

    What is reported before so many `passes` may be old. `report` gets each outcome once it is there.
    """
    deadline = time.monotonic() + seconds
    known: dict[str, Outcome] = {}
    while True:
        made, nodes = ask()
        if made >= passes:
            for node in nodes:
                if node.state != "starting" and node.id not in known:
                    known[node.id] = Outcome(node.host, node.joined, node.problem or _explain(node))
                    report(known[node.id])
        waiting = [node for node in nodes if node.id not in known]
        if made >= passes and not waiting:
            return [known[node.id] for node in nodes]
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    for node in waiting:
        why = (
            f"Ray hasn't started its agent within {seconds:g} s; `ray status` shows what it waits for, such "
            f"as a free processor"
        )
        known[node.id] = Outcome(node.host, None, why, True)
        report(known[node.id])
    return [known[node.id] for node in nodes]


def _explain(node: NodeReport) -> str:
    return "" if node.joined is not None else f"its agent has {node.state}"


def take_down_cluster(paths: Paths, *, delete: bool, report: Report) -> DownReport:
    """End the head of this home and all agents, also those of Ray, as `take_down_hosts`."""
    record = read_head(paths)
    if record is None or not record.ray:
        return take_down_hosts(paths, delete=delete, report=report)
    left: dict[str, str] = {}
    addresses = _list_addresses(paths)
    with contextlib.ExitStack() as stack:
        ray = _connect_to_end(stack, record.ray, make_namespace(record.cluster), left)
        if ray is not None:
            ray.end_controller()  # it would start agents again
        done = take_down_hosts(paths, delete=delete and not left, report=report)
        missed = dict(done.left)
        if ray is not None:
            for name in sorted(ray.end_all()):
                left[f"{name} in Ray"] = "the actor hasn't ended"
            dead = _list_dead(ray)
            missed = {node: why for node, why in missed.items() if addresses.get(node) not in dead}
    if not left and paths.head.exists():
        change_head(paths, ray="")
    return replace(done, left={**missed, **left})


def _connect_to_end(
    stack: contextlib.ExitStack, address: str, namespace: str, left: dict[str, str]
) -> RayCluster | None:
    """Connect to the Ray cluster. Where that can't be, note in `left` what may still be there."""
    obstacle = find_gcs_obstacle(address)
    if isinstance(obstacle, ConnectionRefusedError):
        return None  # the cluster has ended, and with it its actors
    try:
        if obstacle is not None:
            raise ClusterError(str(obstacle.strerror or obstacle))
        return stack.enter_context(connect_to_ray(address, namespace))
    except (ClusterError, InputError) as error:
        left[f"Ray at {address}"] = f"it can't be asked to end its agents: {error}"
        return None


def _list_addresses(paths: Paths) -> dict[str, str]:
    """Return the address of each agent, as far as it is known."""
    try:
        return {str(member.facts.node): member.facts.address for member in read_nodes(paths)[0]}
    except (ClusterError, InputError):
        return {}


def _list_dead(ray: RayCluster) -> set[str]:
    """Return the addresses at which Ray has no node any more."""
    nodes = ray.list_nodes()
    return {node.address for node in nodes} - {node.address for node in nodes if node.alive}
