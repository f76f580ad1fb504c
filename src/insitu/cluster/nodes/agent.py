"""The agent: the process on a machine that owns its store and answers for its node.

It dials the head, so anybody may start it: `insitu up --hosts` over ssh, Slurm, or the user by
`insitu agent`. It serves its partitions to other nodes and keeps a copy of the catalogue. Without a head it
keeps serving, and dials until there is one again.

`agent_process.py` starts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE, make_folder
from insitu.base.disk.durable import replace_file
from insitu.base.errors import ClusterError, GridError, InputError, InsituError
from insitu.base.net.certificates import Certificate, make_certificate, parse_certificate
from insitu.base.net.ports import format_address
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, check_simple_name
from insitu.cluster.decide import Member, membership
from insitu.cluster.engines import Channel, ChannelClosed, Wakeup
from insitu.cluster.failover import HeadFinder, HeadWatch, MemberKeeper, leave_if_replaced
from insitu.cluster.files import describe_error
from insitu.cluster.job_backup import describe_copies, list_files
from insitu.cluster.job_hosts import (
    ReplacedHead,
    TaskServers,
    choose_node,
    remove_new_store,
    set_aside_store,
    sweep_jobs,
)
from insitu.cluster.leases import FollowedHead, followed_head
from insitu.cluster.nodes.agent_files import AgentFiles
from insitu.cluster.wire import (
    JOIN_SECONDS,
    AgentOptions,
    CatalogParts,
    HeadConnection,
    HeadUnreachable,
    Message,
    check_token,
    encode_imports,
    encode_inventory,
    family_of,
    find_unreachable,
    gather_facts,
    is_own_folder,
    measure_load,
    parse_end,
    parse_members,
    read_agent,
    read_kept_members,
    resolve_interface,
    say_farewell,
    take_process_lock,
    write_token,
)
from insitu.grid import (
    StagedImport,
    find_unknown_versions,
    install_catalog_copy,
    is_catalog_copy,
    list_held,
    list_staged_imports,
    tidy_store,
)
from insitu.grid.serving import PartitionServer, refuse_replaced

# An agent's regular work on its store: it removes what nobody needs, and ends imports that died.
#
# Removing much takes long, so that is done in threads: the agent sends its reports to the head meanwhile


IMPORTS_SECONDS = 3.0
"""Seconds between two reports about imports that have brought something to the store."""
TIDY_SECONDS = 30.0


class StoreUpkeep:
    """The upkeep of one agent's store. In the head's own home commands end the imports that died."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        self._paths = paths
        self._node = node
        #: When imports are reported next, and when the store is tidied, on the monotonic clock.
        self._report_at = self._tidy_at = 0.0
        self._tidying: threading.Thread | None = None

    def list_imports(self, now: float) -> Sequence[StagedImport]:
        """Return the imports to be reported to the head, if it is time for that."""
        if now < self._report_at or self._paths.head.exists():
            return ()
        self._report_at = now + IMPORTS_SECONDS
        return list_staged_imports(self._paths)

    def end_import(
        self, server: PartitionServer, staged: StagedImport, published: bool, then: Callable[[], None]
    ) -> None:
        """Mark what an import has brought as published, or remove it, in a thread; `then` is called after."""
        logger.info("the import %s of %s has ended; published: %s", staged.token, staged.cache, published)

        def end() -> None:
            try:
                server.actions.end_import(staged.cache, staged.token, published=published)
            except (InsituError, OSError) as error:
                logger.warning("the import %s of %s isn't ended: %s", staged.token, staged.cache, error)
            then()

        threading.Thread(target=end, daemon=True).start()

    def tidy_soon(self) -> None:
        """Have the next call of `tidy` do it: the catalogue is new."""
        self._tidy_at = 0.0

    def tidy(self, now: float) -> None:
        """Remove from the store what nobody needs any more, if it is time for that, in a thread."""
        busy = self._tidying is not None and self._tidying.is_alive()
        if now < self._tidy_at or busy:
            return
        self._tidy_at = now + TIDY_SECONDS
        self._tidying = threading.Thread(target=self._tidy, daemon=True)
        self._tidying.start()

    def _tidy(self) -> None:
        try:
            tidy_store(self._paths, self._node)
        except (InsituError, OSError) as error:
            logger.warning("the store isn't tidied: %s", error)


# `insitu agent --drain-on-term`: SIGTERM drains the node before its agent ends


class DrainOnTerm:
    """The drain that a signal has begun."""

    def __init__(self, seconds: float) -> None:
        """`seconds` that the drain may take; 0: the agent ends at once."""
        self._seconds = seconds
        #: When the agent ends at the latest, on the monotonic clock; None before the signal.
        self._until: float | None = None
        #: Whether the head knows it.
        self._asked = False
        #: Whether the head has refused.
        self._refused = False

    def begin(self) -> bool:
        """Note the signal. Returns False if the agent must end at once, as by a second one."""
        if not self._seconds or self._until is not None:
            return False
        self._until = time.monotonic() + self._seconds
        return True

    def refuse(self, why: str) -> None:
        """Note that the node can't be drained."""
        logger.warning("not drained: %s", why)
        self._refused = True

    def advance(self, channel: Channel, members: Mapping[NodeId, Member], node: NodeId) -> bool:
        """Have the head drain the node. Returns True once the agent must end. Raises ChannelClosed."""
        if self._until is None:
            return False
        left = self._until - time.monotonic()
        if not self._asked:
            self._asked = True
            logger.info("SIGTERM: this node is drained within %.0f s", left)
            channel.send({"do": "drain", "seconds": max(0.0, left)})
            return False
        own = members.get(node)
        return left <= 0 or self._refused or (own is not None and own.is_empty)


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
        """Raise InputError or ClusterError if this home has no store that the agent could own."""
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
        self._task_servers = TaskServers(paths, self.node, self._token, options.tied_to)
        self._server: PartitionServer | None = None
        self._connection: HeadConnection | None = None
        self._files = AgentFiles(paths, self.node)
        self._followed = FollowedHead(paths, self.node)
        self._finder = HeadFinder(paths, self.node, self._token, self._followed)
        self._watch = HeadWatch(paths, self.node, self._followed, self._find_head_host)
        self._answers = AgentAnswers(paths, self._followed, self._files)
        self._catalog = CatalogParts()
        self._upkeep = StoreUpkeep(paths, self.node)
        #: Set by the server: the head must receive the content of the store.
        self._store_changed = threading.Event()
        self._unknown_versions = 0
        #: The agents of the cluster, by node; the head sends them.
        self.members: dict[NodeId, Member] = {}
        #: Findings of `_check_others`, to be sent.
        self._checks: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wakeup = Wakeup(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._is_waiting = False
        self._trying_since = time.monotonic()
        self._stopping = False
        self._goes_down = self._deletes = False
        self._keeper = MemberKeeper(paths, self._token)
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
            if not self._options.tied_to:  # a member would outlive what this agent ends with
                self._keeper.start()
            self._watch.start()
            away = self._join_first()
            self._is_new = False
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
        """Join; or serve until there is a head, and return the report on that."""
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
            except ReplacedHead:
                if time.monotonic() > deadline:
                    raise
            except _Refused as refusal:
                if not refusal.again or time.monotonic() > deadline:
                    raise
            self._pause(_RETRY_SECONDS[0])
            if self._stopping:
                raise _Stopped

    def _serve_without_head(self) -> bool:
        """Serve at the address by which the others know this store. Return False if it hasn't had a head."""
        members = read_kept_members(self._paths)
        own, record = members.get(self.node), read_agent(self._paths, self.node)
        if own is None or record is None:
            return False
        self._serve_at(self._choose_host(own.facts.address), own.facts.port)
        self.members = members
        self._files.record_members(members)
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
        poll.register(self._followed, select.POLLIN)
        poll.poll(seconds * 1000)
        self._wakeup.take_signals()

    # Joining

    def _join(self) -> None:
        """Connect to the head and join. Raises InsituError, _Stopped."""
        self._is_waiting = True
        try:
            if self._stopping:
                raise _Stopped
            connection, address = self._finder.dial(self._options.head)
            self._options = replace(self._options, head=address)
            try:
                self._serve_at(self._choose_host(connection.own_host))
                self._ask_to_join(connection)
                self._followed.record_joined(connection.head, self._options.head)
            except BaseException:
                connection.channel.close()
                raise
        finally:
            self._is_waiting = False
        self._connection = connection
        if not self._paths.head.exists():
            write_token(self._paths, self._token)  # for commands in this home

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

    def _find_head_host(self) -> str:
        """Return the address for a head that is started here; "": none is, as it would outlive what this
        agent ends with."""
        return "" if self._server is None or self._options.tied_to else self._server.address.host

    def _serve_at(self, host: str, port: int = 0) -> None:
        """Serve the store at `host`, unless that is done. `port`: the port, unless the user has said so.
        Raises ClusterError if the port is taken."""
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
                find_number=self._followed.find_number,
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
                        self._watch.take_settings(message)
                        self._report_store(connection)
                        for later in messages[index + 1 :]:
                            self._act(later)
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
        """Send the content of the store to the head."""
        for (cache, version), partitions in list_held(self._paths, self.node).items():
            connection.channel.send(encode_inventory(cache, version, partitions))
        connection.channel.send({"do": "inventory_end"})

    # Serving

    def _serve_head(self) -> None:
        """Send heartbeats and do what the head says, until the connection ends or the head is silent."""
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
                    self._finder.look_with_head(self.members)
                self._stopping |= self._drain.advance(channel, self.members, self.node)
                while not self._checks.empty():
                    channel.send(self._checks.get())
                poll = select.poll()
                poll.register(self._wakeup, select.POLLIN)
                poll.register(self._files.head, select.POLLIN)
                poll.register(self._followed, select.POLLIN)
                poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent_bytes else 0))
                poll.poll(max(0.0, beat_at - now) * 1000)
                self._wakeup.take_signals()
                leave_if_replaced(self._followed, channel, self._options.head)
                channel.flush()
                self._files.head.send(channel)
                while messages := channel.receive():
                    heard = time.monotonic()
                    self._files.head.record_heard()
                    for message in messages:
                        self._act(message)
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
        self._files.head.record_lost()
        self._followed.record_lost()

    def _act(self, message: Message) -> None:
        match message.get("do"):
            case "catalog":
                data = self._catalog.add(message)
                if data is not None:
                    self._take_catalog(data)
            case "end_import" if self._server is not None:
                self._upkeep.end_import(self._server, *parse_end(message), then=self._store_changed.set)
            case "members":
                self.members = parse_members(message.get("members"))
                self._files.record_members(self.members)
            case "names":
                self._files.head.record_answer(message)
            case "check":
                threading.Thread(target=self._check_others, args=(message,), daemon=True).start()
            case "engine":
                self._start_tasks(message)
            case "drain" if "refused" in message:
                self._drain.refuse(str(message["refused"]))
            case "stop":
                logger.info("the head ends this agent")
                self._stopping = self._goes_down = True
                self._deletes = message.get("delete") is True

    def _start_tasks(self, message: Message) -> None:
        """Start what runs the tasks of a job here. The job's supervisor learns by itself what comes of it."""
        try:
            if self._server is not None:
                self._task_servers.start(message, self._server.address.host)
        except (InsituError, OSError) as error:
            logger.warning("no task of a job can run here: %s", error)

    def _check_others(self, asked: Message) -> None:
        """Find out which agents can't be reached from here; the heartbeat reports them."""
        found = find_unreachable(self.members, without=self.node)
        self._checks.put({"do": "checked", "number": asked.get("number"), "unreachable": found})

    def _take_catalog(self, data: bytes) -> None:
        """Put the head's catalogue in the place of the copy, unless this is the head's home."""
        try:
            if not self._paths.head.exists() or is_catalog_copy(self._paths):
                install_catalog_copy(self._paths, data)
                self._upkeep.tidy_soon()
            self._unknown_versions = len(find_unknown_versions(self._paths))
        except (InsituError, OSError) as error:
            logger.warning("the copy of the catalogue stays as it is: %s", error)

    def _close(self) -> None:
        """End the server, say so, and let go of the store."""
        self._watch.close()
        self._task_servers.close()
        if self._server is not None:
            ending = threading.Thread(target=self._server.stop, daemon=True)
            ending.start()
            ending.join(_CLOSE_SECONDS)  # a stream to somebody who doesn't read would hold it up
        self._files.close(delete=self._deletes)
        dropped = set_aside_store(self._paths, self.node) if self._deletes else None
        if self._connection is not None:
            say_farewell(self._connection.channel, _CLOSE_SECONDS)
        self._keeper.close(ends=self._goes_down, deletes=self._deletes)
        if dropped is not None:
            shutil.rmtree(dropped, ignore_errors=True)
        elif self._is_new:
            remove_new_store(self._paths, self.node)
        self._wakeup.close()
        os.close(self._lock)


# Answers of an agent to other machines by the server of its store, beside partitions and rows


# Answers other machines that look for the copy of a job; see `store.py`. Never writes


KINDS = ("job_copies", "job_copy_files", "job_copy_part")
PART_BYTES = 1 << 20
_MOST_FILES = 1 << 20


def answer_about_copies(paths: Paths, kind: str, fields: Fields) -> tuple[Fields, bytes]:
    """Answer a question about the copies of jobs in this home: which there are, what files one has, and what
    is in a file. Raises InputError for what there can't be, GridError for what isn't there, OSError."""
    if kind == "job_copies":
        return {"copies": describe_copies(paths)}, b""
    job_id = fields.get("job")
    if type(job_id) is not str:
        raise InputError(f"A job has an id. Received: {job_id!r:.100}")
    root = paths.job_copy(check_simple_name("A job's id", job_id)).root
    if not is_own_folder(root):
        raise GridError(f"There is no copy of {job_id} here")
    if kind == "job_copy_files":
        return {"files": [list(each) for each in list_files(root)][:_MOST_FILES]}, b""
    path, start = fields.get("path"), fields.get("start")
    if type(start) is not int or start < 0:
        raise InputError(f"A part of a file begins at a byte. Received: {start!r:.100}")
    if path not in dict(list_files(root)):
        raise GridError(f"The copy of {job_id} here has no file {path!r:.100}")
    with (root / str(path)).open("rb") as file:
        file.seek(start)
        return {}, file.read(PART_BYTES)


Fields = dict[str, Any]


class AgentAnswers:
    """Gives each question to the part of the agent that knows the answer. For several threads."""

    def __init__(self, paths: Paths, head: FollowedHead, files: AgentFiles) -> None:
        self._paths = paths
        self._head = head
        self._files = files

    def answer(self, kind: str, fields: Fields, payload: bytes) -> tuple[Fields, bytes]:
        """Do what is asked for, and return failures as answers."""
        try:
            if kind in followed_head.KINDS:
                return self._head.answer(kind, fields), b""
            if kind == "drop":
                # A head that stood still until it was replaced would drop the copy that is left.
                refuse_replaced(fields.get("cluster_number"), self._head.find_number())
            if kind in KINDS:
                return answer_about_copies(self._paths, kind, fields)
        except (InsituError, OSError) as error:
            return describe_error(error), b""
        return self._files.answer(kind, fields, payload)


# The certificate of one agent, which its store keeps.
#
# Other agents recognize it by what the head has said last. So one that is started again while there is no
# head has to show the same


def take_certificate(paths: Paths, node: NodeId) -> Certificate:
    """Return the certificate that the store of `node` keeps. A new one is made if there is none, or others
    may read its key; if it can't be kept, as on a full disk, it is used once."""
    path = paths.agent_certificate(node)
    with contextlib.suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(file) as opened:
            found = os.fstat(file)
            if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
                return parse_certificate(opened.read())
    made = make_certificate()
    with contextlib.suppress(OSError):
        replace_file(path, f"{made.pem}{made.key_pem}".encode(), mode=PRIVATE_FILE)
    return made
