"""The agent: the process on a machine that owns its store and answers for its node.

It dials the head, so anybody may start it: `insitu up --hosts` over ssh, Slurm, or the user by
`insitu agent`. It serves its partitions to other nodes and keeps a copy of the catalogue. Without a head it
goes on serving, and dials until there is one again.

`python -P -m insitu.cluster.agents.agent HOME OPTIONS READY` with the token as its input is started by
`insitu agent --detach`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from insitu.access import make_folder
from insitu.cluster.agents.addresses import family_of, resolve_interface
from insitu.cluster.agents.agent_answers import AgentAnswers
from insitu.cluster.agents.agent_files import AgentFiles
from insitu.cluster.agents.connection import HeadConnection, HeadUnreachable, dial_head, say_farewell
from insitu.cluster.agents.detached import report_ready
from insitu.cluster.agents.drain_on_term import DrainOnTerm
from insitu.cluster.agents.facts import gather_facts, measure_load
from insitu.cluster.agents.head_change import HeadChange
from insitu.cluster.agents.head_finding import HeadFinder
from insitu.cluster.agents.home import check_home, choose_node, remove_new_store, set_aside_store
from insitu.cluster.agents.messages import (
    CatalogParts,
    Message,
    encode_imports,
    encode_inventory,
    parse_end,
    parse_members,
    parse_take_over_after,
)
from insitu.cluster.agents.options import JOIN_SECONDS, AgentOptions
from insitu.cluster.agents.own_certificate import take_certificate
from insitu.cluster.agents.own_taking_over import OwnTakingOver
from insitu.cluster.agents.process_log import keep_log_bounded
from insitu.cluster.agents.reachability import find_unreachable
from insitu.cluster.agents.records import (
    check_token,
    read_agent,
    take_process_lock,
    write_token,
)
from insitu.cluster.agents.saved_members import read_kept_members
from insitu.cluster.agents.task_servers import TaskServers, sweep_jobs
from insitu.cluster.agents.tied import tie_to
from insitu.cluster.agents.upkeep import StoreUpkeep
from insitu.cluster.decide import Member, membership
from insitu.cluster.engines import ChannelClosed, Wakeup
from insitu.errors import ClusterError, InputError, InsituError
from insitu.grid import find_unknown_versions, install_catalog_copy, list_held
from insitu.grid.transfer import PartitionServer
from insitu.paths import Paths
from insitu.ports import format_address
from insitu.processes import ProcessIdentity
from insitu.spec import NodeId
from insitu.unauthenticated import is_loopback

logger = logging.getLogger("insitu")
_ANSWER_SECONDS = 10.0
_HEARTBEAT_SECONDS = 1.0
_RETRY_SECONDS = (0.5, 10.0)
"""The first and the longest pause between two attempts to reach the head."""
_CLOSE_SECONDS = 5.0


class _Refused(ClusterError):
    """The head doesn't let this agent in."""

    def __init__(self, message: str, again: bool = False) -> None:
        super().__init__(message)
        #: Whether the reason may be over soon.
        self.again = again


class _Stopped(Exception):
    """A signal asks this process to end while it waits for a head."""


class Agent:
    """Serves one store as long as the process lives."""

    def __init__(self, paths: Paths, options: AgentOptions, token: str) -> None:
        """Raise InputError or ClusterError where this home has no store that the agent could own."""
        self._paths = paths
        self._options = options
        self._token = check_token(token)
        #: The node whose store this is.
        self.node: NodeId = choose_node(paths, options.name)
        self._is_new = not paths.node(self.node).exists()
        make_folder(paths.home, paths.node(self.node))
        lock = take_process_lock(paths.agent_lock(self.node))
        if lock is None:
            served = read_agent(paths, self.node)
            raise ClusterError(
                f"A store has one agent. Received: {self.node} in {paths.home}, which process "
                f"{served.pid if served else 'another'} serves"
                f"{f' for the head at {served.head}' if served else ''}. `insitu agent --stop` ends it"
            )
        self._lock = lock
        self._certificate = take_certificate(paths, self.node)
        sweep_jobs(paths, self.node)
        self._task_servers = TaskServers(paths, self.node, self._token)
        self._server: PartitionServer | None = None
        self._connection: HeadConnection | None = None
        self._files = AgentFiles(paths, self.node, self._token, lambda: self._connection is not None)
        self._head_change = HeadChange(paths, self.node)
        self._finder = HeadFinder(paths, self.node, self._token)
        self._answers = AgentAnswers(paths, self._head_change, self._files)
        self._own_taking_over = OwnTakingOver(paths, self.node, self._head_change)
        self._catalog = CatalogParts()
        self._upkeep = StoreUpkeep(paths, self.node)
        #: Set by the server: the head is to hear what the store holds.
        self._store_changed = threading.Event()
        self._unknown_versions = 0
        #: The agents of the cluster, by node; the head sends them.
        self.members: dict[NodeId, Member] = {}
        #: What `_check_others` has found, to be sent.
        self._checks: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wakeup = Wakeup(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._is_waiting = False
        self._trying_since = time.monotonic()
        self._stopping = False
        self._deletes = False
        self._drain = DrainOnTerm(options.drain_seconds)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_signal(self, *_: object) -> None:
        self._stopping = True
        if self._is_waiting:
            raise _Stopped

    def _on_term(self, *_: object) -> None:
        if self._connection is None or not self._drain.begin():
            self._on_signal()

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Join, call `report` with what was joined, and serve until the head or a signal ends it.

        Raises InsituError if it can't join within JOIN_SECONDS, and the store can't be served without a head.
        """
        try:
            away = self._join_first()
            self._is_new = False
            self._own_taking_over.begin()
            if self._server is None:
                raise ClusterError("An agent serves its store. Received: no server")
            address = self._server.address
            where = format_address(address.host, address.port)
            report({"node": self.node, "address": where, "host": socket.gethostname(), **away})
            while not self._stopping:
                self._serve_head()
                if not self._stopping:
                    self._join_again()
        except _Stopped:
            pass
        finally:
            self._close()

    def _join_first(self) -> dict[str, str]:
        """Join; or serve until there is a head, and return what to tell about that."""
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                self._join()
                return {}
            except HeadUnreachable as error:
                if not self._serve_without_head():
                    raise
                logger.warning("the store is served without a head: %s", error)
                return {"without_head": str(error)}
            except _Refused as refusal:
                if not refusal.again or time.monotonic() > deadline:
                    raise
            self._pause(_RETRY_SECONDS[0])
            if self._stopping:
                raise _Stopped

    def _serve_without_head(self) -> bool:
        """Serve where the others know this store to be. Return False if it hasn't had a head."""
        members = read_kept_members(self._paths)
        own, record = members.get(self.node), read_agent(self._paths, self.node)
        if own is None or record is None:
            return False
        self._serve_at(self._choose_host(own.facts.address), own.facts.port)
        self.members = members
        self._files.note_members(members)
        self._head_change.note_lost()
        return True

    def _join_again(self) -> None:
        """Dial until a head lets this agent in, or a signal comes."""
        pause, said = _RETRY_SECONDS[0], ""
        self._trying_since = time.monotonic()
        while not self._stopping:
            self._pause(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])
            try:
                self._join()
                logger.info("has joined again")
                return
            except (InsituError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("not joined: %s", said)

    def _pause(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self._head_change, select.POLLIN)
        poll.poll(seconds * 1000)
        self._wakeup.take_signals()

    # Joining

    def _join(self) -> None:
        """Connect to the head and join. Raises InsituError, _Stopped."""
        self._is_waiting = True
        try:
            if self._stopping:
                raise _Stopped
            self._options = replace(self._options, head=self._head_change.take_address(self._options.head))
            connection = self._dial()
            try:
                check_home(self._paths, self.node, connection.head, self._options.head)
                self._serve_at(self._choose_host(connection.own_host))
                self._ask_to_join(connection)
                self._head_change.note_joined(connection.head, self._options.head)
            except BaseException:
                connection.channel.close()
                raise
        finally:
            self._is_waiting = False
        self._connection = connection
        if not self._paths.head.exists():
            write_token(self._paths, self._token)  # for commands in this home

    def _dial(self) -> HeadConnection:
        """Connect to the head, or to one that has taken over from it while this agent was away."""
        try:
            return dial_head(self._options.head, self._token, "agent")
        except ClusterError:
            found = self._finder.find(self._options.head)
            if not found:
                raise
        self._options = replace(self._options, head=found)
        return dial_head(found, self._token, "agent")

    def _choose_host(self, routed: str) -> str:
        if not self._options.interface:
            return routed
        host = resolve_interface(self._options.interface, family_of(routed))
        if is_loopback(host) and not is_loopback(routed):
            raise InputError(
                f"Other hosts must reach the address of an agent. Received: --interface "
                f"{self._options.interface}, which is {host} on the loopback interface. Leave it out: the "
                f"one that routes to the head is {routed}"
            )
        return host

    def _serve_at(self, host: str, port: int = 0) -> None:
        """Serve the store at `host`, unless that is done. `port`: where, unless the user has said so. Raises
        ClusterError where the port is taken."""
        if self._server is not None and self._server.address.host == host:
            return
        if self._server is not None:
            self._server.stop()
            self._server = None
        port = self._options.port or port
        try:
            # Flight would share the port with another server of this user.
            with socket.socket(family_of(host), socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((host, port))
            self._server = PartitionServer(
                self._paths,
                self.node,
                self._token.encode(),
                self._certificate,
                host=host,
                port=port,
                on_change=self._store_changed.set,
                files=self._answers.answer,
            )
        except OSError as error:
            raise ClusterError(
                f"An agent needs an address that is its own. Received: {format_address(host, port)} "
                f"({error.strerror or error}). End the program that has it, or choose another by --interface "
                f"and --port"
            ) from error

    def _ask_to_join(self, connection: HeadConnection) -> None:
        if self._server is None:
            raise ClusterError("An agent serves its store before it joins. Received: no server")
        address = self._server.address
        facts = gather_facts(self._paths, self.node, address.host, address.port, address.certificate)
        channel = connection.channel
        try:
            waited = time.monotonic() - self._trying_since
            channel.send({"do": "join", "facts": asdict(facts), "load": self._measure(), "waited": waited})
            deadline = time.monotonic() + _ANSWER_SECONDS
            while (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent_bytes else 0))
                poll.poll(left * 1000)
                channel.flush()
                messages = channel.receive()
                for index, message in enumerate(messages):
                    if message.get("do") == "refuse":
                        raise _Refused(str(message.get("reason")), message.get("again") is True)
                    if message.get("do") == "welcome":
                        self._report_store(connection)
                        for later in messages[index + 1 :]:
                            self._obey(later)
                        return
        except ChannelClosed:
            raise ClusterError(
                f"The head at {self._options.head} has ended the connection. Its log, head.log in its "
                f"INSITU_HOME, says why"
            ) from None
        raise ClusterError(
            f"The head at {self._options.head} must answer within {_ANSWER_SECONDS:g} s. Received: nothing"
        )

    def _measure(self) -> dict[str, int]:
        return asdict(measure_load(self._paths, self.node, self._unknown_versions))

    def _report_store(self, connection: HeadConnection) -> None:
        """Tell the head what the store holds."""
        for (cache, version), partitions in list_held(self._paths, self.node).items():
            connection.channel.send(encode_inventory(cache, version, partitions))
        connection.channel.send({"do": "inventory_end"})

    # Serving

    def _serve_head(self) -> None:
        """Send heartbeats and obey until the connection ends, or the head is silent for too long."""
        connection = self._connection
        if connection is None:
            return
        channel = connection.channel
        heard = beat_at = time.monotonic()
        try:
            while not self._stopping:
                now = time.monotonic()
                if now >= beat_at:
                    channel.send({"do": "alive", "load": self._measure()})
                    beat_at = now + _HEARTBEAT_SECONDS
                    if self._store_changed.is_set():
                        self._store_changed.clear()
                        self._report_store(connection)
                    if staged := self._upkeep.list_imports(now):
                        channel.send(encode_imports(staged))
                    self._upkeep.tidy(now)
                self._stopping |= self._drain.advance(channel, self.members, self.node)
                while not self._checks.empty():
                    channel.send(self._checks.get())
                poll = select.poll()
                poll.register(self._wakeup, select.POLLIN)
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent_bytes else 0))
                poll.poll(max(0.0, beat_at - now) * 1000)
                self._wakeup.take_signals()
                channel.flush()
                while messages := channel.receive():
                    heard = time.monotonic()
                    for message in messages:
                        self._obey(message)
                if time.monotonic() - heard > membership.LOST_SECONDS:
                    logger.warning("the head has said nothing for %g s", membership.LOST_SECONDS)
                    raise ChannelClosed
            return
        except ChannelClosed:
            logger.warning("the connection to the head has ended")
        except Exception as error:
            kind = "" if isinstance(error, InsituError) else f"{type(error).__name__}: "
            logger.warning("the connection to the head is closed: %s%s", kind, error)
        channel.close()
        self._connection = None
        self._head_change.note_lost()

    def _obey(self, message: Message) -> None:
        match message.get("do"):
            case "catalog":
                data = self._catalog.add(message)
                if data is not None:
                    self._take_catalog(data)
            case "end_import" if self._server is not None:
                self._upkeep.end_import(self._server, *parse_end(message), then=self._store_changed.set)
            case "members":
                self.members = parse_members(message.get("members"))
                self._files.note_members(self.members)
                self._head_change.note_time(parse_take_over_after(message.get("take_over_after")))
            case "check":
                threading.Thread(target=self._check_others, args=(message,), daemon=True).start()
            case "engine":
                self._start_tasks(message)
            case "drain" if "refused" in message:
                self._drain.refuse(str(message["refused"]))
            case "stop":
                logger.info("the head ends this agent")
                self._stopping = True
                self._deletes = message.get("delete") is True

    def _start_tasks(self, message: Message) -> None:
        """Start what runs the tasks of a job here. The job's supervisor learns by itself what comes of it."""
        try:
            if self._server is not None:
                self._task_servers.start(message, self._server.address.host)
        except (InsituError, OSError) as error:
            logger.warning("no task of a job can run here: %s", error)

    def _check_others(self, asked: Message) -> None:
        """Find out which agents can't be reached from here; the heartbeat tells the head."""
        found = find_unreachable(self.members, without=self.node)
        self._checks.put({"do": "checked", "number": asked.get("number"), "unreachable": found})

    def _take_catalog(self, data: bytes) -> None:
        """Put the head's catalogue in the place of the copy, unless this is the head's home."""
        try:
            if not self._paths.head.exists():
                install_catalog_copy(self._paths, data)
                self._upkeep.tidy_soon()
            self._unknown_versions = len(find_unknown_versions(self._paths))
        except (InsituError, OSError) as error:
            logger.warning("the copy of the catalogue stays as it is: %s", error)

    def _close(self) -> None:
        """End the server, say so, and let go of the store."""
        self._own_taking_over.close()
        self._task_servers.close()
        if self._server is not None:
            ending = threading.Thread(target=self._server.stop, daemon=True)
            ending.start()
            ending.join(_CLOSE_SECONDS)  # a stream to somebody who doesn't read would hold it up
        self._files.close(delete=self._deletes)
        dropped = set_aside_store(self._paths, self.node) if self._deletes else None
        if self._connection is not None:
            say_farewell(self._connection.channel, _CLOSE_SECONDS)
        if dropped is not None:
            shutil.rmtree(dropped, ignore_errors=True)
        elif self._is_new:
            remove_new_store(self._paths, self.node)
        self._wakeup.close()
        os.close(self._lock)


def run_agent(
    paths: Paths, options: AgentOptions, token: str, report: Callable[[dict[str, Any]], None]
) -> None:
    """Be the agent until the head or a signal ends it. Raises InsituError where it can't join."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Else each stranger at the port of the store's server makes a line, and who comes again and again a full
    # disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    tie_to(ProcessIdentity(*each) for each in options.tied_to)
    agent = Agent(paths, options, token)
    keep_log_bounded(paths.agent_log(agent.node))
    agent.run(report)


def main(arguments: list[str]) -> NoReturn:
    paths, options = Paths(Path(arguments[0])), AgentOptions(**json.loads(arguments[1]))
    ready = [int(arguments[2])]

    def report(message: dict[str, Any]) -> None:
        report_ready(ready.pop(), message)

    code = 0
    try:
        run_agent(paths, options, sys.stdin.read().strip(), report)
    except (InsituError, OSError) as error:
        code = error.exit_code if isinstance(error, InsituError) else 1
        if ready:
            report({"error": str(error), "code": code})
        else:
            logger.error("%s", error)
    sys.stderr.flush()
    os._exit(code)  # a stream of Flight that nobody reads would keep the process


if __name__ == "__main__":
    main(sys.argv[1:])
