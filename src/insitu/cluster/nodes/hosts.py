"""Brings up the head and an agent on each host, takes them down, and asks how they are."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import ProcessIdentity, identify_process, open_process
from insitu.base.spec import NodeId
from insitu.cluster.decide import Claim, is_replaced
from insitu.cluster.failover import (
    OWN_ETCD,
    HostCommands,
    bring_up_members,
    drop_cluster,
    end_cluster,
    open_agents,
    prepare_etcd,
    start_head,
)
from insitu.cluster.job_files import rotated_path
from insitu.cluster.job_hosts import ReplacedHead, choose_node, end_process, find_running
from insitu.cluster.wire import (
    CHECK_SECONDS,
    JOIN_SECONDS,
    AgentOptions,
    AgentRecord,
    HeadRecord,
    HeadUnreachable,
    Outcome,
    ask_for_nodes,
    ask_head,
    change_head,
    check_launcher,
    check_record_owner,
    check_token,
    dial_head,
    find_unreachable,
    is_locked,
    list_agents,
    make_start_command,
    make_stop_command,
    make_token,
    parse_hosts,
    read_head,
    read_kept_members,
    read_token,
    run_on_hosts,
    start_detached,
    wait_for_record,
)
from insitu.exchange import parse_address
from insitu.grid import list_nodes_with_stores

_START_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_ASK_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_DOWN_SECONDS = 30.0
"""Longer than the head waits for its agents."""

Report = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class HostRequest:
    """The arguments of `insitu up --hosts`."""

    #: The text of the file of hosts.
    text: str
    #: The file's name in errors.
    name: str
    #: The command that runs something on a host.
    launcher: str
    #: The command that runs insitu on a host.
    insitu: str
    #: Interface or address of the head; empty: the one that routes to the hosts.
    interface: str = ""
    #: The port of the head; 0: that of the last time, else the system chooses.
    port: int = 0
    #: The process that the head ends with, and all agents with it; 0: none.
    tied_to: int = 0
    #: The URL of the etcd that holds the metadata; OWN_ETCD: one that insitu runs; empty: what the home says,
    #: else the head's home holds it.
    metadata: str = ""


def bring_up_hosts(paths: Paths, request: HostRequest, report: Report) -> tuple[str, list[Outcome]]:
    """Start the head of this home, unless it runs, and an agent on each host.

    Returns the head's address, and what came of each host. Raises InputError for what can't be tried at all,
    ClusterError if the head can't start.
    """
    lines = parse_hosts(request.text, request.name)
    check_launcher(request.launcher)
    address = bring_up_head(paths, request, report)
    token = make_token(paths)
    stops = {line.label: make_stop_command(line, request.insitu) for line in lines}
    before = read_head(paths)
    hosts = {**((before and before.hosts) or {}), **stops}
    change_head(paths, launcher=request.launcher, hosts=hosts)
    starts = [(line.host, make_start_command(line, request.insitu, address)) for line in lines]
    outcomes = run_on_hosts(request.launcher, starts, f"{token}\n", report)
    # A start that failed has left nothing there. For one that said nothing, `down` makes sure.
    nothing_there = {
        line.label for line, o in zip(lines, outcomes, strict=True) if o.answer is None and not o.silent
    }
    known = (before and before.hosts) or {}
    kept = {host: stop for host, stop in hosts.items() if host in known or host not in nothing_there}
    reached = {line.label for line, o in zip(lines, outcomes, strict=True) if o.answer is not None}
    change_head(paths, hosts=kept, launchers=_choose_launchers(before, request.launcher, kept, reached))
    return address, outcomes


def bring_up_head(paths: Paths, request: HostRequest, report: Report | None = None) -> str:
    """Start the head of this home, unless it runs, at an address that all hosts of the request reach. Members
    of etcd that insitu runs are started before it, if there is a launcher.

    Returns its address. Raises as `bring_up_hosts`.
    """
    lines = parse_hosts(request.text, request.name)
    check_record_owner(paths)
    check_head_home(paths)
    tied_to = _identify_process(request.tied_to)
    if request.metadata and request.metadata != OWN_ETCD:
        prepare_etcd(paths, request.metadata)
    if request.launcher:
        commands = HostCommands(lines, request.launcher, request.insitu, request.interface)
        bring_up_members(paths, commands, report or (lambda outcome: None), asked=request.metadata)
    make_token(paths)
    return start_head(paths, request.interface, request.port, [line.address for line in lines], tied_to)


def _identify_process(pid: int) -> ProcessIdentity | None:
    """Return which process has this number; None for 0. Raises InputError if there is none."""
    found = identify_process(pid) if pid else None
    if pid and found is None:
        raise InputError(
            f"--tied-to is the number of a process that runs on this machine. Received: {pid}. That of a "
            f"script of the shell is $$"
        )
    return found


def _choose_launchers(
    before: HeadRecord | None, launcher: str, hosts: Iterable[str], reached: Container[str]
) -> dict[str, str]:
    """Return the launcher of each host: one that it was reached by stays until another one reaches it."""
    known = _list_launchers(before) if before is not None else {}
    return {host: launcher if host in reached else known.get(host, launcher) for host in hosts}


def _list_launchers(record: HeadRecord) -> dict[str, str]:
    kept = record.launchers or {}
    return {host: kept.get(host, record.launcher) for host in record.hosts or {}}


def check_head_home(paths: Paths) -> None:
    """Raise InputError if the home is that of an agent of another head."""
    if read_head(paths) is not None:
        return
    for node, record in list_agents(paths).items():
        raise InputError(
            f"The home of a head isn't that of another head's agent. Received: {paths.home}, whose {node} "
            f"belongs to the head at {record.head}. Run the command there, or set INSITU_HOME to another "
            f"folder"
        )


@dataclass(frozen=True, slots=True)
class DownReport:
    """The outcome of `insitu down` on hosts."""

    #: Nodes whose agents have ended.
    ended: tuple[str, ...]
    #: Hosts, or nodes, on which an agent may still run, and why nothing else is known.
    left: Mapping[str, str]


def take_down_hosts(paths: Paths, *, delete: bool, report: Report) -> DownReport:
    """End the head of this home and the agents of all hosts; with `delete` their stores go, too.

    Unreachable hosts are named, and tried again by the next call. Raises ClusterError, InputError.
    """
    check_record_owner(paths)
    record = read_head(paths)
    if record is None:
        return DownReport((), {})
    ended: set[str] = set()
    missed: set[str] = set()
    if is_locked(paths.head_lock):
        record = wait_for_record(paths)
        message = {"do": "down", "delete": delete}
        try:
            answer = ask_head(record.address, read_token(paths), message, _DOWN_SECONDS)
            ended, missed = set(answer.get("ended", ())), set(answer.get("unreachable", ()))
        finally:
            _end_head(paths, record)
    left = end_cluster(paths, record, has_answered=bool(ended or missed))
    stops = dict(record.hosts or {})
    further = " --unless-led --json --delete" if delete else " --unless-led --json"
    launchers = _list_launchers(record)
    outcomes: dict[str, Outcome] = {}
    for launcher in sorted(set(launchers.values())):
        names = [name for name in stops if launchers[name] == launcher]
        commands = [(name.partition(" ")[0], f"{stops[name]}{further}") for name in names]
        outcomes |= zip(names, run_on_hosts(launcher, commands, "", report), strict=True)
    for name, outcome in outcomes.items():
        if outcome.answer is None:
            left[name] = outcome.problem
        else:
            ended |= set(outcome.answer.get("stopped", ()))
            missed -= set(outcome.answer.get("stores", ()))
    kept = {name: launchers[name] for name in left if name in stops}
    started = None if record.hosts is None else {name: stops[name] for name in kept}
    change_head(paths, hosts=started, launchers=kept, pid=0, start=0)
    lost = "it was lost before; `insitu agent --stop` there ends what may run"
    left |= dict.fromkeys(sorted(missed), lost)
    if delete and not left:  # the next cluster is another one
        logs = (paths.head_log, rotated_path(paths.head_log))
        drop_cluster(paths)
        metadata = (*paths.home.glob(f"{paths.metadata.name}*"), paths.metadata_settings, paths.fence)
        for file in (paths.head, paths.members, paths.token, *logs, *metadata, paths.head_lock):
            file.unlink(missing_ok=True)
    return DownReport(tuple(sorted(ended)), left)


def _end_head(paths: Paths, record: HeadRecord) -> None:
    """Wait until the head has ended, and kill it if it doesn't. If it runs this command for a caller, it ends
    after that."""
    if record.pid == os.getppid():
        return
    process = open_process(ProcessIdentity(record.pid, record.start))
    if process is not None:
        try:
            end_process(process)
        finally:
            os.close(process)


def start_agent(paths: Paths, options: AgentOptions, token: str) -> dict[str, Any]:
    """Start an agent that outlives this process. Return what it has joined: node, address and host.

    If it runs already for the same head, nothing is started. Raises InputError, ClusterError.
    """
    check_token(token)
    parse_address(options.head)
    node = choose_node(paths, options.name)
    running = find_running(paths).get(node)
    if running is not None and running.head != options.head:
        running = _change_head_of(paths, node, running, options.head, token)
    if running is not None:
        _wait_for_member(paths, node, options.head, token)
        return {"node": node, "address": "", "host": running.host, "already": True}
    arguments = [str(paths.home), json.dumps(asdict(options))]
    log = paths.agent_log(node)
    return start_detached(
        paths,
        "insitu.cluster.nodes.agent_process",
        arguments,
        log,
        JOIN_SECONDS + _START_SECONDS,
        f"{token}\n",
    )


def _change_head_of(
    paths: Paths, node: NodeId, running: AgentRecord, head: str, token: str
) -> AgentRecord | None:
    """Have an agent that runs follow the head at this address, if that has replaced its own. Returns its
    record, or None if it stays with its own. Raises InsituError, OSError."""
    try:
        found = dial_head(head, token, "client")
    except HeadUnreachable:
        return None
    found.channel.close()
    cluster, epoch, instance = (found.head[name] for name in ("cluster", "epoch", "instance"))
    seen, asked = Claim(running.epoch, running.instance), Claim(int(epoch), str(instance))
    if cluster != running.cluster:
        return None
    if is_replaced(asked, seen):
        message = {"do": "replaced", "cluster": cluster, "epoch": running.epoch, "address": running.head}
        ask_head(head, token, message, _ASK_SECONDS)
        raise ReplacedHead(
            f"A head that was replaced has no agents any more. Received: the head at {head}, which the one "
            f"at {running.head} has replaced, and which has ended now"
        )
    members = {n: m for n, m in read_kept_members(paths).items() if n == node}
    if not is_replaced(seen, asked) or not members:
        return None
    with open_agents(members, running.cluster, token, _ASK_SECONDS) as agents:
        agents.tell(node, "accept_head", address=head, epoch=asked.number, instance=asked.instance)
    return running


def _wait_for_member(paths: Paths, node: NodeId, head: str, token: str) -> None:
    """Wait until the head has let in an agent that runs. Raises ClusterError if it doesn't, with the
    reason."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        member = next((m for m in ask_for_nodes(head, token) if m.facts.node == node), None)
        if member is not None and member.connection is not None:
            return
        if member is not None and member.refused:
            raise ClusterError(f"The agent of {node} runs, but isn't let in. {member.refused}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The agent of {node} runs, and must join the head at {head} within {JOIN_SECONDS:g} s. "
                f"Received: it hasn't. Its log says why",
                logs=str(paths.agent_log(node)),
            )
        time.sleep(_LOOK_SECONDS)


def check_unled(paths: Paths) -> None:
    """Raise InputError if an agent of this home has a head that lives: `insitu down` of another home, such as
    a copy of that head's, or that of the previous head, ends none of its agents."""
    for node, record in find_running(paths).items():
        try:
            ask_head(
                record.head, read_token(paths), {"do": "nodes"}, _ASK_SECONDS, connect_seconds=_ASK_SECONDS
            )
        except ClusterError:
            continue
        raise InputError(
            f"A head ends its own agents alone. Received: {node}, whose head at {record.head} lives. Run "
            f"`insitu down` on the machine of that head"
        )


def stop_report(paths: Paths, stopped: list[NodeId]) -> dict[str, Any]:
    """Return what `insitu agent --stop --json` prints: nodes that were ended, and stores of this home."""
    return {"stopped": list(stopped), "stores": list_nodes_with_stores(paths)}


def find_separated(paths: Paths) -> list[tuple[str, str, str]]:
    """Return (from, to, why) of each pair of nodes that can't talk. This machine counts as "this machine".

    There is none if the home belongs to no cluster. Raises ClusterError if the head doesn't answer.
    """
    record = read_head(paths)
    addresses = [found.head for found in list_agents(paths).values()]
    if record is not None:
        if not is_locked(paths.head_lock):
            raise ClusterError(
                "A head must run to check its nodes. `insitu up` with --hosts or --engine, as before, starts "
                "it"
            )
        addresses = [wait_for_record(paths).address]
    if not addresses:
        return []
    token = read_token(paths)
    answer = ask_head(addresses[0], token, {"do": "check"}, CHECK_SECONDS + _ANSWER_SECONDS)
    own = find_unreachable({m.facts.node: m for m in ask_for_nodes(addresses[0], token)})
    pairs = [(str(source), str(target), str(why)) for source, target, why in answer["pairs"]]
    pairs += [("this machine", target, why) for target, why in own.items()]
    silent = f"it said nothing for {CHECK_SECONDS:g} s"
    return [*pairs, *((str(node), "the others", silent) for node in answer["silent"])]


def read_hosts_file(path: Path) -> str:
    """Return the text of a file of hosts. Raises InputError if it can't be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--hosts names a file with a host a line. Received: {path} ({error}). Write one"
        ) from error
