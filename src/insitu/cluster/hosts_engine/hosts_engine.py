"""The engine of a job whose tasks run on several hosts: one server on each, see `host_server.py`.

The job's supervisor, on the head's machine, asks the head to have a host's agent start a server, which dials
back. Neither head nor agent is needed from then on: the job continues without them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from insitu.base.context import GPU_NUMBERS_ENV
from insitu.base.errors import ClusterError, InsituError
from insitu.base.net.ports import format_address
from insitu.base.paths import JobPaths, Paths
from insitu.base.plugins import ENGINES, load_plugin
from insitu.base.progress import Progress, ProgressWriter
from insitu.base.roster import Roster
from insitu.base.spec import JobSpec, NodeId, TaskId, TaskSpec
from insitu.cluster.decide import SILENT_SECONDS, VANISHED_SECONDS, Failure, HostWatch
from insitu.cluster.engines import (
    Channel,
    Command,
    Ended,
    Message,
    NodeState,
    Output,
    ProcessState,
    SignalName,
    TaskFiles,
)
from insitu.cluster.hosts_engine.host_link import BEAT_SECONDS, HostLink
from insitu.cluster.hosts_engine.job_supplies import JobSupplies
from insitu.cluster.job_backup import (
    STATISTICS,
    JobCopying,
    list_changes,
    read_job_files,
    read_parts,
    scan_folder,
)
from insitu.cluster.job_files import Journal, MergedLog, read_placement, read_spec
from insitu.cluster.leases import encode_term, read_term
from insitu.cluster.wire import (
    Acceptor,
    ask_head,
    find_head,
    open_listener,
    parse_members,
    read_head,
    read_token,
)
from insitu.exchange import PeerInfo, connect_within, parse_address, read_host_timeout

logger = logging.getLogger("insitu")
_START_SECONDS = 40.0
"""Seconds in which a host's server starts and dials."""
_PLACE_SECONDS = 180.0
"""Likewise in a place that a plug-in has lost and makes again."""
_LOOK_SECONDS = 2.0
_ASK_SECONDS = 10.0
_CONNECT_SECONDS = 1.0
_CLOSE_SECONDS = 60.0
_WARM_SECONDS = 8.0
"""Seconds that a process which stands by has to import what a task needs, before a task moves to its host."""
_LAUNCH_SECONDS = 30.0
"""Seconds in which partitions come that a task which is started again reads on another node."""
Found = TypeVar("Found")


class StoppedEarly(ClusterError):
    """A job was stopped before there were places for its tasks."""


class ServerStarter(Protocol):
    """A plug-in that makes places in which the servers of a job's hosts run, such as pods that have GPUs.

    It is called with the job. The agent of each node says in its home who the supervisor is; what runs in
    the place beside it starts the server (see `job_hosts/places.py`).
    """

    #: True: its tasks run on hosts of a cluster.
    is_on_hosts: bool

    @staticmethod
    def check(spec: JobSpec) -> None:
        """Raise InputError if a job can't have such places."""

    def make_places(self, nodes: Sequence[NodeId]) -> None:
        """Have a place on each of these nodes, unless it is there. Raises ClusterError."""

    def explain_waiting(self, nodes: Collection[NodeId], *, may_pause: bool) -> str:
        """Return in words what the places on some nodes wait for; "": nothing. Raises ClusterError if
        somebody has removed them, or unless they `may_pause` if they were taken away for a while."""

    def remove_places(self) -> None:
        """Remove the places of a job that is over, or stays stopped, though not all of them know. Raises
        InsituError."""


class HostsEngine(TaskFiles):
    """Runs the tasks of one job on the hosts of a cluster.

    Reports of tasks are kept in the job's folder here, too, where commands look for them. The tasks of a host
    that `HostWatch` finds to be lost count as killed. A server there that lives on ends them as soon as it
    learns of this, or by its lease.
    """

    def __init__(self, job: JobPaths, wake: int | None = None) -> None:
        """Raise ClusterError if this home has no head."""
        super().__init__(job)
        self._wake = wake
        self._paths = Paths(job.root.parent.parent)
        self._log = MergedLog(job)
        self._links: dict[NodeId, HostLink] = {}
        self._nodes: dict[TaskId, NodeId] = {}
        """The node on which each task was launched last."""
        self._asked: set[NodeId] = set()
        """The nodes on which servers were wanted."""
        self._lost: set[NodeId] = set()
        """Hosts that can't be reached."""
        self._writers: dict[TaskId, ProgressWriter] = {}
        self._happened: list[Output | Ended] = []
        """The last messages of servers that were replaced."""
        self._roster: Roster | None = None
        self._standby: tuple[int, Command] | None = None
        self._is_ahead_due = False
        """Whether replacements may lack what they would read. False while one is launched: it goes first."""
        self._beat_at = 0.0
        #: When it was asked last what places wait for, and what that was; "": nothing.
        self._looked_at, self._waits_for = 0.0, ""
        self._watch = HostWatch(read_host_timeout(VANISHED_SECONDS))
        record = read_head(self._paths)
        if record is None or not record.address:
            raise ClusterError(
                f"A job on hosts needs their head. Received: {self._paths.home}, which has none. Run `insitu "
                f"up --hosts` first"
            )
        host = parse_address(record.address)[0]
        listener = open_listener(host, 0)
        self._address = format_address(host, listener.getsockname()[1])
        term = encode_term(read_term(job.term))
        own_info = {"role": "supervisor", "room": "agents", "job": job.root.name, "term": term}
        self._acceptor = Acceptor(listener, read_token(self._paths), own_info)
        self._supplies = JobSupplies(job)
        #: The job's reservations in Ray.
        self.reserved = Reservations(read_spec(job), record.ray, record.cluster)
        self._copying = JobCopying(job)
        #: What makes the places of servers; None: agents start them beside themselves.
        self._starter: ServerStarter | None = None
        if starter := read_spec(job).starter:
            self._starter = load_plugin(ENGINES, starter)(job)

    # Servers on hosts

    def begin(self, nodes: Iterable[NodeId], is_stopped: Callable[[], bool]) -> dict[NodeId, str]:
        """Have servers on the hosts of a job that starts. Returns why that failed, by host.

        Places that a plug-in makes are waited for as long as it takes. Raises ClusterError if they can't be
        made, StoppedEarly once `is_stopped` says that nobody wants them any more.
        """
        nodes = sorted(set(nodes))
        if self._starter is None:
            return self.open_nodes(nodes)
        self._starter.make_places(nodes)
        return self.open_nodes(nodes, math.inf, is_stopped)

    def open_nodes(
        self,
        nodes: Iterable[NodeId],
        seconds: float | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> dict[NodeId, str]:
        """Have servers on these hosts, unless they run. Returns why that failed, by host. They have some
        `seconds` to dial; None: as many as it takes at most where their places are there. Raises
        StoppedEarly, and ClusterError if there will be no places."""
        if seconds is None:
            seconds = _START_SECONDS if self._starter is None else _PLACE_SECONDS
        failed: dict[NodeId, str] = {}
        waiting = set()
        for node in sorted(set(nodes)):
            if (link := self._links.get(node)) is None or link.is_lost:
                self._asked.add(node)
                try:
                    self._ask_for_server(node)
                    waiting.add(node)
                except InsituError as error:
                    failed[node] = str(error)
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            if is_stopped():
                raise StoppedEarly("The job was stopped before there were places for its tasks")
            self._report_waiting(waiting, may_pause=seconds == math.inf)
            self._beat()
            self._poll(BEAT_SECONDS, ())
            for info, channel in self._accept():
                node = NodeId(str(info.get("node")))
                if node in waiting:
                    waiting.discard(node)
                    if why := self._begin(node, channel, info):
                        failed[node] = why
                else:
                    channel.close()
        silent = f"its agent started nothing within {seconds:g} s; agent-NODE.log there may say why"
        failed |= dict.fromkeys(waiting, self._waits_for or silent)
        for node in failed:
            self._lost.add(node)
        return failed

    def _report_waiting(self, nodes: Collection[NodeId], *, may_pause: bool) -> None:
        """Log what places wait for. Raises ClusterError if that isn't to be waited for."""
        if self._starter is None or time.monotonic() < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        found = self._starter.explain_waiting(nodes, may_pause=may_pause)
        if found != self._waits_for:
            self._waits_for = found
            if found:
                self._log.log(found)

    def find_separated(self) -> list[str]:
        """Return "A can't reach B: why" for each pair of hosts whose tasks couldn't connect."""
        links = {link.node: link for link in self._live_links()}
        if len(links) < 2:
            return []
        listening = self._ask_all({link: {"do": "listen"} for link in links.values()}, "address", str)
        calls: dict[HostLink, Message] = {}
        for node, link in links.items():
            others = {other: address for other, address in listening.items() if other != node}
            calls[link] = {"do": "reach", "addresses": others}
        return [
            f"{node} can't reach {to} at {why}"
            for node, unreachable in self._ask_all(calls, "unreachable", dict).items()
            for to, why in unreachable.items()
        ]

    def _ask_all(self, calls: Mapping[HostLink, Message], name: str, kind: type) -> dict[NodeId, Any]:
        """Ask several hosts at the same time, for a field of their answers. Those that don't answer are left
        out; `wait` reports them."""
        answers = {}
        for link, message in calls.items():
            link.tell(message)
        for link in calls:
            with contextlib.suppress(ClusterError):
                answers[link.node] = link.take_answer(name, kind)
        return answers

    def _ask_for_server(self, node: NodeId) -> None:
        """Have the head ask the agent of a node to start a server. Raises InsituError."""
        address = find_head(self._paths)
        if not address:
            raise ClusterError("The head has no record here any more. Run `insitu up --hosts` again")
        message: dict[str, Any] = {"do": "engine", "node": node, "job": self._job.root.name}
        message |= {"address": self._address, "has_place": self._starter is not None}
        ask_head(address, read_token(self._paths), message, _ASK_SECONDS)

    def _accept(self) -> list[tuple[PeerInfo, Channel]]:
        """Return the servers that have dialled, and proved that they are of this cluster."""
        found = []
        if not self._acceptor.is_paused:
            self._acceptor.accept()
        for descriptor in self._acceptor.list_late():
            self._acceptor.drop(descriptor)
        for descriptor in list(self._acceptor.pending):
            done = self._acceptor.advance(descriptor)
            if done is None:
                continue
            channel, info = done
            if info.get("role") == "engine" and info.get("job") == self._job.root.name:
                found.append((info, channel))
            else:
                channel.close()
        return found

    def _begin(self, node: NodeId, channel: Channel, info: PeerInfo) -> str:
        """Give a new server what its tasks read. Returns why that failed, else ""."""
        _, cache = read_placement(self._job)
        shares_folder, door = info.get("shares_folder") is True, str(info.get("door", ""))
        link = HostLink(node, channel, self._job, self._wake, shares_folder=shares_folder, door=door)
        try:
            if not shares_folder:
                link.send_all(read_job_files(self._job))
            push_files(self._job.root, link, whole=False)
            link.reply_timeout = _START_SECONDS
            link.ask({"do": "begin", "cache": cache.name, "version": cache.version})
            link.reply_timeout = SILENT_SECONDS
        except (ClusterError, OSError) as error:
            link.abandon()
            return str(error)
        if self._roster is not None:
            link.tell({"do": "roster", "roster": self._roster.to_json()})
        if self._standby is not None:
            link.keep_standby(*self._standby)
        if (before := self._links.get(node)) is not None:
            self._happened += before.wait(0.0)  # the ends of its tasks
        self._links[node] = link
        self._lost.discard(node)
        self.reserved.forget(node)
        return ""

    def _link_of(self, node: NodeId) -> HostLink:
        """Return the link to a host, which is opened if there is none. Raises ClusterError."""
        link = self._links.get(node)
        if (link is None or link.is_lost) and (why := self.open_nodes([node]).get(node)):
            raise ClusterError(f"no task can run on {node}: {why}")
        return self._links[node]

    def _live_links(self) -> list[HostLink]:
        return [link for link in self._links.values() if not link.is_lost]

    # ProcessControl

    def launch(self, task: TaskSpec, command: Command) -> int:
        link = self._link_of(task.node)
        self.bring_partitions([task], _LAUNCH_SECONDS)
        command = self.reserved.equip(task, command)
        push_files(self._job.root, link, whole=task.task.role != "worker" or task.task.index == 0)
        self._nodes[task.task] = task.node
        link.failures.pop(task.task, None)
        link.progress.pop(task.task, None)
        return link.launch(task, command)

    def keep_standby(self, count: int, command: Command) -> None:
        self._standby = count, command
        self._is_ahead_due = count > 0
        for link in self._live_links():
            link.keep_standby(count, command)

    def signal(self, task: TaskId, name: SignalName) -> None:
        link = self._links.get(self._nodes.get(task, NodeId("")))
        if link is not None and not link.is_lost:
            link.signal(task, name)

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        self._beat()
        self._copying.advance(self._links.values())
        patience = min(BEAT_SECONDS, self._watch.next_look, math.inf if timeout is None else timeout)
        news = bool(self._happened) or any(link.has_news for link in self._links.values())
        self._poll(0.0 if news else patience, (self._wake,))
        for _, channel in self._accept():
            channel.close()  # nobody waits for it any more
        happened, self._happened = self._happened, []
        for link in list(self._links.values()):
            happened += link.wait(0.0)
        self._judge_hosts()
        for link in list(self._links.values()):
            happened += link.wait(0.0)
            if link.is_lost and not link.is_noted:
                link.is_noted = True
                self._record_loss(link)
            self._answer_wanted(link)
        for answer in self._supplies.answer(self._list_readers(self._roster)):
            for link in self._live_links():
                link.tell(answer)
        self._copy_progress()
        self._bring_ahead()
        # Those that a signal ended come first: those after them may only have lost a peer.
        ends = [event for event in happened if isinstance(event, Ended)]
        ends.sort(key=lambda ended: ended.code >= 0)
        return [*(event for event in happened if isinstance(event, Output)), *ends]

    def bring_partitions(self, tasks: Iterable[TaskSpec], seconds: float) -> None:
        """Have the partitions that tasks read in the stores of their nodes, which others may hold alone.

        Raises ClusterError if that can't be done, or isn't within `seconds`.
        """

        def pause(seconds: float) -> None:
            self._beat()
            self._poll(seconds, ())

        self._supplies.require(_find_readers((t.node, t.shards) for t in tasks), seconds, pause)

    def _bring_ahead(self) -> None:
        """A process that stands by needs the rows, too, of the host whose tasks it takes over."""
        if self._is_ahead_due:
            self._is_ahead_due = not self._supplies.bring_ahead(self._list_readers(self._roster), self._lost)

    def _list_readers(self, roster: Roster | None) -> dict[NodeId, set[int]]:
        """Return the shards that the tasks of a roster read on each node that can be reached."""
        members = roster.members if roster is not None else ()
        placed = ((self._nodes.get(m.task, NodeId("")), m.shards) for m in members)
        return _find_readers((n, shards) for n, shards in placed if n and n not in self._lost)

    def _answer_wanted(self, link: HostLink) -> None:
        """Note the further caches that tasks of a host want to know the shards of."""
        evaluates = any(t.role == "evaluator" and n == link.node for t, n in self._nodes.items())
        for cache in link.wanted:
            self._supplies.record_wanted(cache, link.node if evaluates else None)
        link.wanted.clear()
        self._supplies.record_wanted_refreshes(link.wanted_refreshes)
        link.wanted_refreshes.clear()

    def _record_loss(self, link: HostLink) -> None:
        why = link.given_up or "has ended the connection"
        self._log.log(f"{link.node} {why}: its tasks count as killed")
        if link.given_up or not self._is_alive(link.node):
            self._lost.add(link.node)
            self._supplies.avoid(self._lost)
        self._is_ahead_due = False

    def _judge_hosts(self) -> None:
        """Give up the hosts that are lost, and have the others look for those that may be."""
        live = {link.node: link for link in self._live_links()}
        for link in live.values():
            for node in link.seen:
                self._watch.record_seen(node)
            link.seen.clear()
        verdict = self._watch.observe({n: link.read_signs() for n, link in live.items()}, time.monotonic())
        for node, why in verdict.lost.items():
            live[node].give_up(why)
        for node in verdict.suspected:
            for link in self._live_links():
                if link.node != node and live[node].door:
                    link.tell({"do": "look", "node": node, "address": live[node].door})

    def _is_alive(self, node: NodeId) -> bool:
        """Return whether a node's agent still listens, which may be known before its head knows."""
        with contextlib.suppress(InsituError, OSError):
            if address := find_head(self._paths):
                message = {"do": "nodes"}
                answer = ask_head(address, read_token(self._paths), message, _ASK_SECONDS)
                found = parse_members(answer.get("members")).get(node)
                if found is not None and found.state in ("alive", "silent"):
                    facts = found.facts
                    connect_within(facts.address, facts.port, _CONNECT_SECONDS).close()
                    return True
        return False

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_SECONDS
            for link in self._live_links():
                link.beat()
                if any(t.role == "evaluator" and n == link.node for t, n in self._nodes.items()):
                    # It reads checkpoints that a task elsewhere may write.
                    push_files(self._job.root, link, whole=True)
                else:
                    push_statistics(self._job.root, link)

    def _poll(self, timeout: float, more: Sequence[int | None]) -> None:
        """Wait until something comes, or until `timeout` seconds have passed, and take it in."""
        poll = select.poll()
        if not self._acceptor.is_paused:
            poll.register(self._acceptor, select.POLLIN)
        for handshake in self._acceptor.pending.values():
            poll.register(handshake, select.POLLOUT if handshake.has_unsent else select.POLLIN)
        for link in self._live_links():
            poll.register(link, link.events)
        for descriptor in more:
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        poll.poll(timeout * 1000)
        for link in self._live_links():
            link.take_in()

    def close(self) -> None:
        message: Message = {"do": "close"}
        # The places of a paused job come back, and would end at once if they had an exit code.
        if not (is_paused := self._job.paused.exists()):
            message["code"] = None
            with contextlib.suppress(ClusterError):
                message["code"] = Journal(self._job.journal).state().exit_code
        for link in self._live_links():
            self._asked.discard(link.node)
            link.tell(message)
        deadline = time.monotonic() + _CLOSE_SECONDS
        # Each closes its end once nothing runs there any more, and all that was written is here.
        while (left := self._live_links()) and time.monotonic() < deadline:
            before = max(link.heard for link in left)
            self._poll(BEAT_SECONDS, ())
            for link in left:
                link.wait(0.0)
                link.check_silence()
            if max(link.heard for link in left) > before:
                deadline = time.monotonic() + _CLOSE_SECONDS
        for link in self._live_links():
            link.abandon()
        if self._starter is not None and self._asked and not is_paused:
            try:
                self._starter.remove_places()
            except InsituError as error:
                self._log.log(str(error))
        for writer in self._writers.values():
            writer.close()
        self._acceptor.close()
        self._supplies.close()

    # TaskSetup

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        by_node: dict[NodeId, list[TaskSpec]] = {link.node: [] for link in self._live_links()}
        for task in tasks:
            by_node.setdefault(task.node, []).append(task)
        addresses: dict[TaskId, str] = {}
        for node, there in by_node.items():
            addresses |= self._link_of(node).reserve(there)
        return addresses

    def prepare(self, tasks: Sequence[TaskSpec]) -> bool:
        for task in tasks:
            self._link_of(task.node)
        readers = _find_readers((t.node, t.shards) for t in tasks)
        is_there = self._supplies.advance(readers)
        # A process that stands by there has imported by then what a task needs, so that nobody waits for it.
        warm = _WARM_SECONDS if self._standby is not None and self._standby[0] else 0.0
        return is_there and all(time.monotonic() - self._links[t.node].opened >= warm for t in tasks)

    def publish_roster(self, roster: Roster) -> None:
        self._supplies.require(self._list_readers(roster), 0.0, lambda seconds: None)
        super().publish_roster(roster)
        self._roster = roster
        for link in self._live_links():
            link.tell({"do": "roster", "roster": roster.to_json()})

    def clear_records(self, tasks: Sequence[TaskId]) -> None:
        for task in tasks:
            if writer := self._writers.pop(task, None):
                writer.close()
            for link in self._links.values():
                link.progress.pop(task, None)
                link.failures.pop(task, None)
        super().clear_records(tasks)

    # TaskObserver

    def read_progress(self, tasks: Sequence[TaskId]) -> dict[TaskId, Progress]:
        return {t: found for t in tasks if (found := self._find(t, lambda link: link.progress)) is not None}

    def read_failure(self, task: TaskId) -> Failure | None:
        return self._find(task, lambda link: link.failures) or super().read_failure(task)

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        return {t: found for t in tasks if (found := self._find(t, lambda link: link.processes)) is not None}

    def node_states(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeState]:
        found = {}
        for node in nodes:
            link = self._links.get(node)
            if node in self._lost:
                found[node] = NodeState(0, False)
            elif link is not None and link.state is not None and not link.is_lost:
                found[node] = link.state
        return found

    def _find(self, task: TaskId, select_from: Callable[[HostLink], Mapping[TaskId, Found]]) -> Found | None:
        link = self._links.get(self._nodes.get(task, NodeId("")))
        return select_from(link).get(task) if link is not None else None

    def _copy_progress(self) -> None:
        """Let commands on this machine see how far tasks are."""
        for task, node in self._nodes.items():
            found = self._find(task, lambda link: link.progress)
            if found is None or self._links[node].shares_folder:
                continue
            with contextlib.suppress(OSError):
                if task not in self._writers:
                    self._writers[task] = ProgressWriter(self._job.progress(task))
                self._writers[task].copy(found)


def _find_readers(tasks: Iterable[tuple[NodeId, Iterable[int]]]) -> dict[NodeId, set[int]]:
    readers: dict[NodeId, set[int]] = {}
    for node, shards in tasks:
        readers.setdefault(node, set()).update(shards)
    return readers


def open_hosts_engine(
    job: JobPaths, wake: int | None, is_stopped: Callable[[], bool] = lambda: False
) -> HostsEngine:
    """Return the engine with servers on all hosts of the job, as far as they can be reached. Raises
    ClusterError, and StoppedEarly: see `HostsEngine.begin`."""
    engine = HostsEngine(job, wake)
    placement, _ = read_placement(job)
    try:
        failed = engine.begin((task.node for task in placement.tasks), is_stopped)
    except StoppedEarly:
        engine.close()
        raise
    except InsituError as error:
        engine.close()
        raise ClusterError(error.message) from error
    for node, why in failed.items():
        MergedLog(job).log(f"no task can run on {node}: {why}")
    if separated := engine.find_separated():
        engine.close()
        raise ClusterError(
            f"The tasks of a job must reach each other. Received: {'; '.join(separated)}. Open the ports "
            f"from 15000 to 65000 between these hosts, or have their agents serve at other interfaces"
        )
    try:
        # Tasks of the others find another node, as after any loss of a host.
        reached = [task for task in placement.tasks if task.node not in failed]
        engine.reserved.require(reached)
        engine.bring_partitions(reached, math.inf)
    except ClusterError:
        engine.close()
        raise
    return engine


# Sends hosts what the tasks of a job have written into its folder on the head's machine


_OF_LEADER = ("checkpoints/", "export/", "summaries/")


def push_files(root: Path, link: HostLink, *, whole: bool) -> None:
    """Send a host what tasks on others have written and it doesn't have. `root` is the job's folder.

    Unless `whole`, without what only the task that leads the others reads, which may be large.
    """
    if link.shares_folder:
        return
    found = scan_folder(root, link.held)
    if not whole:
        found = {path: mark for path, mark in found.items() if not path.startswith(_OF_LEADER)}
    known = {p: mark for p, mark in link.held.items() if whole or not p.startswith(_OF_LEADER)}
    changed, removed = list_changes(found, known)
    if removed:
        link.tell({"do": "removed", "paths": removed})
    for path, _ in changed:
        link.send_all({"do": "file", **part} for part in read_parts(root, path))
    link.held = {p: mark for p, mark in link.held.items() if p not in known} | found


def push_statistics(root: Path, link: HostLink) -> None:
    """Send a host the statistics that tasks on others have found: its own wait for them."""
    found = {} if link.shares_folder else scan_folder(root, link.held, (STATISTICS,))
    for path, _ in list_changes(found, link.held)[0]:
        link.send_all({"do": "file", **part} for part in read_parts(root, path))
        link.held[path] = found[path]


# A job's GPUs and processors from Ray, as its supervisor knows them.
#
# Ray itself is asked by a process of its own (`ray_reserving.py`), when a node needs more than it has


RESERVE_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.ray.ray_reserving")
_SECONDS = 90.0
_TRAINING = ("chief", "worker")


class Reservations:
    """The GPUs and processors of one job on the nodes of a Ray cluster."""

    def __init__(
        self, spec: JobSpec, address: str, cluster: str, command: Sequence[str] = RESERVE_COMMAND
    ) -> None:
        """`address`: of the Ray cluster; empty: Ray has started no agents, and nothing is reserved."""
        self._job, self._address, self._cluster = spec.job_id, address, cluster
        #: Devices that each task that trains has for itself.
        self._gpus, self._cores = spec.gpus_per_worker, spec.cores_per_worker
        self._command = command
        #: Ray's ids of the GPUs, by node.
        self._given: dict[NodeId, list[str]] = {}
        #: For how many tasks of each node Ray has given what they need.
        self._counts: dict[NodeId, int] = {}
        #: The node on which each task runs that needs something.
        self._nodes: dict[TaskId, NodeId] = {}

    def require(self, tasks: Iterable[TaskSpec]) -> None:
        """Have what tasks need that train. Raises ClusterError, which says who has it, and reserves nothing
        then."""
        if not self._address or not (self._gpus or self._cores):
            return
        self._nodes |= {task.task: task.node for task in tasks if task.task.role in _TRAINING}
        counts = Counter(self._nodes.values())
        short = {node: count for node, count in counts.items() if self._counts.get(node, 0) < count}
        if not short:
            return
        answer = self._ask(short)
        if answer.get("error"):
            raise ClusterError(f"Nothing can be reserved with Ray: {answer['error']}")
        if answer["failed"]:
            named = "; ".join(f"{node}: {why}" for node, why in sorted(answer["failed"].items()))
            raise ClusterError(
                f"Ray must have free what the job's tasks are given. Received: {named}. Wait until that has "
                f"ended, or start with fewer --workers, --gpus-per-worker or --cores-per-worker"
            )
        for node, gpus in answer["gpus"].items():
            self._given[NodeId(node)] = list(map(str, gpus))
            self._counts[NodeId(node)] = short[NodeId(node)]

    def forget(self, node: NodeId) -> None:
        """Ask Ray again before tasks run on a node: its host may have been offline, and Ray with it."""
        self._given.pop(node, None)
        self._counts.pop(node, None)

    def _ask(self, counts: Mapping[NodeId, int]) -> dict[str, Any]:
        wanted = {
            n: {"gpus": self._gpus * count, "cores": self._cores * count} for n, count in counts.items()
        }
        message = {"address": self._address, "cluster": self._cluster, "job": self._job, "wanted": wanted}
        try:
            done = subprocess.run(
                self._command, input=json.dumps(message), capture_output=True, text=True, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
        try:
            answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return {"error": f"the process that asks ended with exit code {done.returncode} ({last:.300})"}
        return answer

    def equip(self, task: TaskSpec, command: Command) -> Command:
        """Return the command of a task with the GPUs out of which it gets its own, also on a node that it
        hasn't been on.

        Ray numbers GPUs as the leases of a host do. Raises ClusterError if it names them in another way, or
        can't give what the task needs.
        """
        self.require([task])
        if not self._address or not self._gpus or task.task.role not in _TRAINING:
            return command
        given = self._given.get(task.node, [])
        if not all(gpu.isdecimal() for gpu in given):
            raise ClusterError(
                f"Ray must name GPUs by their numbers. Received: {', '.join(given)} of {task.node}. Start "
                f"Ray there with numbers in CUDA_VISIBLE_DEVICES, or without it"
            )
        return replace(
            command, environment={**command.environment, GPU_NUMBERS_ENV: ",".join(sorted(given, key=int))}
        )
