"""Brings up the head and an agent on each node of a Ray cluster, and takes them down."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from insitu.base._version import __version__
from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.process_log import start_logging
from insitu.base.spec import NodeId
from insitu.cluster.decide import DrainNode, KeepNode, holders, plan_drains
from insitu.cluster.failover import start_head
from insitu.cluster.nodes.hosts import (
    DownReport,
    Report,
    check_head_home,
    take_down_hosts,
)
from insitu.cluster.nodes.node_draining import ask_to_drain
from insitu.cluster.ray import (
    Died,
    HolderAnswer,
    HolderSettings,
    RayCluster,
    RayNode,
    connect_to_ray,
    find_gcs_obstacle,
    make_namespace,
)
from insitu.cluster.wire import (
    START_SECONDS,
    HeadRecord,
    Outcome,
    change_head,
    check_record_owner,
    make_token,
    read_head,
    read_nodes,
)

_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 0.3
_PASSES = 2
"""After so many passes of the controller what it reports is younger than the question."""


@dataclass(frozen=True, slots=True)
class RayRequest:
    """The arguments of `insitu up --engine ray`."""

    #: "auto", or the address of the Ray cluster as host:port.
    address: str
    #: Interface or address of insitu's head; empty: the one that routes to the nodes.
    interface: str = ""
    #: The port of insitu's head; 0: that of the last time, else the system chooses.
    port: int = 0


def bring_up_ray(paths: Paths, request: RayRequest, report: Report) -> tuple[str, list[Outcome]]:
    """Start the head of this home, unless it runs, and an agent on each node of a Ray cluster.

    Nodes that join later get one, too. Returns the head's address, and what came of each node that is there.
    Raises InputError for what can't be tried at all, ClusterError if Ray or the head can't be reached.
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

    Reports before so many `passes` may be old. `report` gets each outcome once it is there.
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
    """Connect to the Ray cluster. If that fails, note in `left` what may still be there."""
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


# The controller: an actor of Ray that has a holder on each node, also on nodes that join later.
#
# It is pinned to the head of the Ray cluster, and Ray restarts it. So no process of insitu depends on Ray:
# those that are connected to Ray end if its head is lost, and neither the head nor an agent may. Its actions
# are decided in `insitu.cluster.decide.holders`


logger = logging.getLogger("insitu")
PASS_SECONDS = 2.0
"""Seconds between two looks at the nodes of Ray."""
_ASK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How the agent of a node of Ray is, for who brings the nodes up."""

    #: Ray's id of the node.
    id: str
    #: The name of its host.
    host: str
    #: Its address in Ray.
    address: str
    #: How its agent is.
    state: holders.HolderState
    #: The node that the agent has joined, its address and host; None before that.
    joined: dict[str, Any] | None
    #: Why it isn't there; empty if nothing is wrong.
    problem: str


AskToDrain = Callable[[NodeId, float | None], None]
"""Has the head drain a node within so many seconds, or keep it (None)."""


class DrainNotices:
    """Reports to the head that Ray is about to withdraw nodes, or that they are back."""

    def __init__(self, ask: AskToDrain) -> None:
        self._ask = ask
        #: The nodes that the head was asked to drain, with the deadlines in seconds since 1970.
        self._asked: dict[NodeId, float] = {}
        #: Why the head couldn't be asked last, or has refused, by node.
        self._problems: dict[NodeId, str] = {}

    def advance(
        self, draining: Mapping[str, float | None], joined: Mapping[str, NodeId], wall: float
    ) -> None:
        """Ask the head for what is missing. `draining` and `joined` are as of `plan_drains`."""
        for action in plan_drains(draining, joined, self._asked, wall):
            try:
                match action:
                    case DrainNode(node, until):
                        self._ask(node, max(0.0, until - wall))
                        logger.info("Ray takes %s away within %.0f s: it is drained", node, until - wall)
                    case KeepNode(node):
                        self._ask(node, None)
            except (ClusterError, InputError) as error:
                if self._problems.get(action.node) != str(error):  # each pass tries again
                    self._problems[action.node] = str(error)
                    logger.warning("the head doesn't let %s leave or stay: %s", action.node, error)
                continue
            self._problems.pop(action.node, None)
            if isinstance(action, DrainNode):
                self._asked[action.node] = action.until
            else:
                del self._asked[action.node]


class HolderKeeper:
    """Brings holders into the state that they should be in, a pass at a time."""

    def __init__(self, ray: RayCluster, settings: HolderSettings, ask: AskToDrain) -> None:
        self._ray = ray
        self._notices = DrainNotices(ask)
        self.settings = settings
        #: How many passes have been made. Read by `insitu up`, which waits for some.
        self.passes = 0
        self._nodes: dict[str, RayNode] = {}
        self._answers: dict[str, HolderAnswer] = {}
        self._failures: dict[str, holders.Failure] = {}
        self._problems: dict[str, str] = {}
        #: Protects the fields that other threads read and write.
        self._lock = threading.Lock()

    def advance(self, now: float, wall: float = 0.0) -> None:
        """Look at the nodes and holders, and do what is missing. `now` is the monotonic clock, `wall` the
        time since 1970."""
        nodes = {node.id: node for node in self._ray.list_nodes() if node.alive}
        there = self._ray.list_holders()
        answers = self._ray.ask_holders(nodes.keys(), _ASK_SECONDS)
        with self._lock:
            self._nodes = nodes
            self._take(answers, there, now)
            given = {node: self._answers[node].settings if node in self._answers else None for node in there}
            actions = holders.reconcile(nodes.keys(), given, self.settings.serial, self._failures, now)
        for action in actions:
            match action:
                case holders.StartHolder(node):
                    logger.info("starts an agent on %s", nodes[node].host)
                    self._ray.start_holder(nodes[node], self.settings)
                case holders.EndHolder(node):
                    self._ray.end_holder(node)
        self._notices.advance(self._ray.list_draining(), self._find_joined(), wall)
        with self._lock:
            self.passes += 1

    def _find_joined(self) -> dict[str, NodeId]:
        return {
            node: NodeId(str(answer.joined["node"]))
            for node, answer in self._answers.items()
            if answer.state == "joined" and answer.joined is not None
        }

    def _take(self, answers: Mapping[str, HolderAnswer | Died], there: set[str], now: float) -> None:
        for node, answer in answers.items():
            match answer:
                case Died(problem):
                    self._answers.pop(node, None)
                    self._problems[node] = problem
                    self._failures[node] = holders.record_failure(self._failures.get(node), now)
                    logger.warning("the holder on %s has ended: %s", self._nodes[node].host, problem)
                    self._ray.end_holder(node)
                    there.discard(node)
                case HolderAnswer():
                    self._answers[node] = answer
                    self._problems.pop(node, None)
                    self._failures.pop(node, None)
        for known in (self._answers, self._problems, self._failures):
            for node in known.keys() - self._nodes.keys():
                del known[node]
        for node in self._answers.keys() - there:
            del self._answers[node]

    def report(self) -> tuple[int, list[NodeReport]]:
        """Return how many passes have been made, and how each node's agent is."""
        with self._lock:
            return self.passes, [self._describe(node) for node in self._nodes.values()]

    def _describe(self, node: RayNode) -> NodeReport:
        answer = self._answers.get(node.id)
        if answer is not None and answer.settings == self.settings.serial:
            return NodeReport(node.id, node.host, node.address, answer.state, answer.joined, answer.problem)
        problem = self._problems.get(node.id, "")
        state: holders.HolderState = "failed" if problem else "starting"
        return NodeReport(node.id, node.host, node.address, state, None, problem)

    def start_again(self) -> int:
        """Start agents that were asked to end, or whose next start waits. Return the passes so far."""
        with self._lock:
            waiting = [node for node, each in self._answers.items() if each.state in ("ended", "failed")]
            for node in waiting:
                self._answers.pop(node)
            self._problems.clear()
            self._failures.clear()
            passes = self.passes
        for node in waiting:
            self._ray.start_agent_again(node)
        return passes


class AgentController:
    """An actor of Ray: a `HolderKeeper` and a thread that lets it advance."""

    def __init__(self, namespace: str, settings: HolderSettings) -> None:
        start_logging()

        def ask(node: NodeId, seconds: float | None) -> None:
            ask_to_drain(settings.head, settings.token, node, seconds)

        self._keeper = HolderKeeper(RayCluster(namespace), settings, ask)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._keeper.advance(time.monotonic(), time.time())
            except Exception:  # the next pass may see what this one couldn't
                logger.exception("the nodes of Ray can't be looked at")
            time.sleep(PASS_SECONDS)

    def fits(self, settings: HolderSettings) -> bool:
        """Return whether holders get these settings, whatever their serial is."""
        own = self._keeper.settings
        return (own.head, own.token, own.version) == (settings.head, settings.token, __version__)

    def report(self) -> tuple[int, list[NodeReport]]:
        """As `HolderKeeper.report`."""
        return self._keeper.report()

    def start_again(self) -> int:
        """As `HolderKeeper.start_again`."""
        return self._keeper.start_again()
