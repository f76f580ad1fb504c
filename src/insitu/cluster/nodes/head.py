"""The head: it knows which agents there are, and alone changes the catalogue. `head_process.py` starts it."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import time
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from insitu.base.errors import ClusterError, GridError, InputError, InsituError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.base.typed import convert
from insitu.cluster.decide import Member, Membership, membership
from insitu.cluster.engines import Channel, ChannelClosed, Wakeup
from insitu.cluster.leases import JobUpkeep, Lead, ReplacementNotices, record_replacement
from insitu.cluster.nodes.head_files import HeadFiles
from insitu.cluster.nodes.re_replication import CopyUpkeep
from insitu.cluster.wire import (
    CHECK_SECONDS,
    Acceptor,
    CatalogVersion,
    HeadRecord,
    Message,
    Relays,
    TextsByName,
    check_role,
    damage_logged,
    encode_end,
    encode_members,
    identify_catalog,
    is_orphaned,
    parse_facts,
    parse_imports,
    parse_inventory,
    parse_load,
    parse_seconds,
    read_head,
    read_versions,
    resume_members,
    save_members,
    split_catalog,
)
from insitu.grid import Catalog, CatalogWatch, find_ended_imports, read_stores, reconcile_store
from insitu.metadata import encode_settings, read_settings

logger = logging.getLogger("insitu")
TICK_SECONDS = 0.5
DOWN_SECONDS = 10.0
"""Seconds in which agents end that are asked to."""
JOINED_SECONDS = 60.0
"""Seconds for which a connection may stay that isn't a member's, or a command's that asks nothing."""
_MAX_UNSENT_BYTES = 64 << 20
"""An agent that doesn't read so much beside the catalogue is disconnected."""


class _Caller:
    """One authenticated connection."""

    def __init__(self, number: int, channel: Channel, role: str) -> None:
        #: The number of the connection, which is never used again.
        self.number = number
        self.channel = channel
        self.role = role  # "agent" or "client"
        #: The agent's inventory of its store so far: {(cache, version): {partition: (bytes, checksum)}}.
        self.inventory: dict[tuple[str, int], dict[int, tuple[int, str]]] = {}
        #: True: the agent has said that it ends.
        self.leaving = False
        #: True: close once everything has been sent.
        self.closing = False
        #: True once a client has asked something: it may wait long for the answer.
        self.has_asked = False
        #: The catalogue that it was sent last.
        self.catalog: CatalogVersion | None = None
        #: When it began, or was last a member's, on the monotonic clock.
        self.used_at = time.monotonic()


class Head:
    """Serves the agents and the command line of one cluster, in one thread."""

    def __init__(
        self,
        paths: Paths,
        acceptor: Acceptor,
        record: HeadRecord,
        files: HeadFiles,
        lead: Lead | None = None,
    ) -> None:
        """`lead`: its lease, if etcd holds the metadata."""
        self._paths = paths
        self._acceptor = acceptor
        self.record = record
        self.lead = lead
        #: True: `down` was asked for and done.
        self.went_down = False
        self._membership = resume_members(paths, Membership(read_versions()))
        self._callers: dict[int, _Caller] = {}
        self._next_number = 0
        self._catalog = CatalogWatch(paths)
        self._catalog_version: CatalogVersion | None = None
        #: Who waits for the end of the agents, and until when.
        self._down: tuple[list[_Caller], float] | None = None
        self._checks = ReachChecks()
        self._copies = CopyUpkeep(paths)
        self._jobs = None if lead is None else JobUpkeep(paths, lead.store)
        self._relays = Relays(paths)
        self._files = files
        self._notices = ReplacementNotices(paths, record)
        self._stopping = False
        self._wakeup = Wakeup(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def serve(self) -> None:
        """Serve until a signal comes, or `down` has been asked for and done."""
        tick_at = 0.0
        try:
            while not self._stopping:
                self._wait(max(0.0, tick_at - time.monotonic()))
                if self._wakeup.take_signals():
                    self._stopping = True
                if time.monotonic() >= tick_at:
                    tick_at = time.monotonic() + TICK_SECONDS
                    self._tick()
        finally:
            self._files.close()
            self._relays.close()
            self._copies.close()
            if self._jobs is not None:
                self._jobs.close()
            self._notices.close()
            for caller in list(self._callers.values()):
                with contextlib.suppress(ChannelClosed):
                    caller.channel.flush()
                caller.channel.close()
            self._acceptor.close()

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self._files, select.POLLIN)
        if not self._acceptor.is_paused:
            poll.register(self._acceptor, select.POLLIN)
        for handshake in self._acceptor.pending.values():
            poll.register(handshake, select.POLLOUT if handshake.has_unsent else select.POLLIN)
        by_descriptor = {caller.channel.fileno(): caller for caller in self._callers.values()}
        for descriptor, caller in by_descriptor.items():
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if caller.channel.unsent_bytes else 0))
        relayed = self._relays.list_descriptors(lambda number: self._callers[number].channel.unsent_bytes)
        for descriptor, (_, events) in relayed.items():
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(seconds * 1000):
            if descriptor == self._acceptor.fileno():
                self._acceptor.accept()
            elif descriptor in self._acceptor.pending:
                self._advance(descriptor)
            elif descriptor in by_descriptor:
                self._receive(by_descriptor[descriptor])
            elif descriptor == self._files.fileno():
                for number, answer in self._files.take_answers(self._callers):
                    self._send(self._callers[number], answer)
            elif (asking := self._callers.get(relayed.get(descriptor, (0, 0))[0])) is not None:
                self._send(asking, *self._relays.advance(asking.number))

    def _advance(self, descriptor: int) -> None:
        found = self._acceptor.advance(descriptor)
        if found is None:
            return
        channel, info = found
        try:
            role = check_role(info)
        except InputError:
            channel.close()
            return
        self._next_number += 1
        self._callers[self._next_number] = _Caller(self._next_number, channel, role)

    def _receive(self, caller: _Caller) -> None:
        """Handle what has come. Whatever is wrong with it ends the connection, never the head."""
        try:
            caller.channel.flush()
            if caller.closing and not caller.channel.unsent_bytes:
                raise ChannelClosed
            while caller.number in self._callers and (messages := caller.channel.receive()):
                for message in messages:
                    self._handle(caller, message)
        except ChannelClosed:
            self._end(caller)
        except Exception as error:
            kind = "" if isinstance(error, InsituError) else f"{type(error).__name__}: "
            logger.warning("connection %d is closed: %s%s", caller.number, kind, error)
            self._end(caller)

    def _end(self, caller: _Caller) -> None:
        if self._callers.pop(caller.number, None) is None:
            return
        self._relays.end(caller.number)
        caller.channel.close()
        self._decide(membership.Ended(caller.number, caller.leaving))

    def _send(self, caller: _Caller, *messages: Message) -> None:
        try:
            for message in messages:
                caller.channel.send(message)
            if caller.channel.unsent_bytes > _MAX_UNSENT_BYTES + 2 * len(self._catalog.data or b""):
                raise ChannelClosed
        except ChannelClosed:
            self._end(caller)

    def _handle(self, caller: _Caller, message: Message) -> None:
        if caller.role == "client":
            caller.has_asked = True
            self._answer(caller, message)
            return
        match message.get("do"):
            case "join":
                facts, load = parse_facts(message.get("facts")), parse_load(message.get("load"))
                self._membership = replace(self._membership, local_stores=read_stores(self._paths))
                waited = parse_seconds("waited", message.get("waited"))
                self._decide(membership.Joining(caller.number, facts, load, waited))
            case "alive":
                self._decide(membership.Heard(caller.number, parse_load(message.get("load"))))
                self._send(caller, {"do": "alive"})
            case "inventory":
                cache, version, partitions = parse_inventory(message)
                caller.inventory[cache, version] = partitions
            case "inventory_end":
                with damage_logged():
                    self._reconcile(caller)
            case "imports":
                self._end_imports(caller, message)
            case "checked":
                unreachable = convert("unreachable", message.get("unreachable"), TextsByName, ClusterError)
                self._checks.note(message.get("number"), caller.number, unreachable)
            case "names":
                self._files.begin(caller.number, message)
            case "drain":
                seconds = parse_seconds("seconds", message.get("seconds"))
                self._drain(caller, self._node_of(caller), seconds)
            case "replaced":
                record_replacement(self._paths, self.record, message)
                self._stopping = True
            case "leave":
                caller.leaving = True
                self._end(caller)
            case other:
                raise ClusterError(f"A head knows what an agent asks for. Received: {other!r:.100}")

    # Members

    def _decide(self, event: membership.Event) -> None:
        decided, actions = membership.decide(self._membership, event, time.monotonic(), time.time())
        self._membership = decided
        for action in actions:
            self._act(action)

    def _act(self, action: membership.Action) -> None:
        caller = None if isinstance(action, membership.Changed) else self._callers.get(action.connection)
        match action:
            case membership.Changed():
                self._save_members()
                self._files.record_members(self._membership.members)
                for each in self._agents():
                    self._send(each, self._list_members())
            case membership.Admit() if caller is not None:
                member = self._membership.members[action.node]
                logger.info("%s has joined from %s", action.node, member.facts.address)
                with damage_logged():
                    self._record_store(member, action.formerly)
                self._send(caller, {"do": "welcome", "node": action.node, "metadata": self._describe_store()})
                self._send_catalog()
            case membership.Refuse() if caller is not None:
                logger.warning("refused: %s", action.reason)
                self._send(caller, {"do": "refuse", "reason": action.reason, "again": action.again})
                caller.closing = True
            case membership.Close() if caller is not None:
                self._callers.pop(caller.number)
                caller.channel.close()
            case membership.Probe() if caller is not None:
                self._send(caller, {"do": "alive"})

    def _agents(self) -> list[_Caller]:
        joined = {member.connection for member in self._membership.members.values()}
        return [caller for caller in self._callers.values() if caller.number in joined]

    def _list_members(self) -> Message:
        return {"do": "members", "members": encode_members(self._membership)}

    def _save_members(self) -> None:
        try:
            save_members(self._paths, self._membership.members, sync=True)
        except OSError as error:
            logger.warning("the list of nodes can't be saved: %s", error)

    # Catalogue

    def _record_store(self, member: Member, formerly: NodeId | None) -> None:
        """Write the present node of the store into the catalogue."""
        if not self._paths.catalog.exists():
            return
        moved = {formerly: member.facts.node} if formerly is not None else {}
        known = Catalog(self._paths).stores().get(member.facts.store)
        if known is not None and known != member.facts.node:
            moved[known] = member.facts.node
        if known != member.facts.node:
            Catalog(self._paths).record_stores({member.facts.store: member.facts.node}, moved)

    def _end_imports(self, caller: _Caller, message: Message) -> None:
        """Report to an agent which of its imports have ended. It asks again soon if that isn't known: agents
        would wait too long for this thread while etcd is silent."""
        imports = parse_imports(message)
        if self.lead is None or (self.lead.is_etcd_answering and self.lead.may_lead()):
            with damage_logged():
                for staged, published in find_ended_imports(self._paths, imports):
                    self._send(caller, encode_end(staged, published))

    def _reconcile(self, caller: _Caller) -> None:
        member = self._membership.find(caller.number)
        inventory, caller.inventory = caller.inventory, {}
        if member is None or not self._paths.catalog.exists():
            return
        for change in reconcile_store(Catalog(self._paths), member.facts.node, inventory):
            logger.warning("%s: %s", member.facts.node, change)

    def _send_catalog(self) -> None:
        """Send agents what is new in the catalogue. One that reads slowly gets the newest, not each."""
        data, version = self._catalog.data, self._catalog_version
        if data is None or version is None:
            return
        for caller in self._agents():
            if caller.catalog != version and not caller.channel.unsent_bytes:
                before, caller.catalog = caller.catalog, version
                self._send(caller, *split_catalog(data, version, before))

    def _describe_store(self) -> Message | None:
        """Return which etcd holds the metadata, for agents, of which one may be the next head."""
        settings = read_settings(self._paths)
        return None if settings is None else encode_settings(settings)

    def _tick(self) -> None:
        for descriptor in self._acceptor.list_late():
            self._acceptor.drop(descriptor)
        self._decide(membership.Tick())
        self._end_idle()
        try:
            changed = self._catalog.poll()
        except InsituError as error:
            logger.warning("the catalogue isn't sent: %s", error)
            changed = False
        if changed and self._catalog.data is not None:
            self._catalog_version = identify_catalog(self._catalog.data)
        self._send_catalog()
        for number, answer in self._checks.take_answers(self._callers, time.monotonic()):
            if number in self._callers:
                self._send(self._callers[number], answer)
        self._keep_copies(changed)
        if self._down is not None:
            self._advance_down()
        if self.lead is not None:
            self.lead.options = {"copy_lost_after": self.record.copy_lost_after}
            if self.lead.ended:
                logger.warning("%s", self.lead.ended)
                self._stopping = True

    def _keep_copies(self, changed: bool) -> None:
        """Have copies made again that are missing since nodes are lost, or needed since they leave."""
        if changed:
            self._copies.record_change()
        now = time.monotonic()
        self.record = read_head(self._paths) or self.record  # `insitu up` may have changed it
        if self._down is None and is_orphaned(self.record):
            logger.warning("ends with its agents: the process that it is tied to has ended")
            self._begin_down(delete=False)
        if self._down is None and (self.lead is None or self.lead.may_lead()):
            for event in self._copies.advance(self._membership, self.record.copy_lost_after, now):
                self._decide(event)
            if self._jobs is not None:
                self._jobs.advance(self._membership, now)

    def _end_idle(self) -> None:
        """Close connections that take no part: who knows the token, but doesn't join, would hold them."""
        now = time.monotonic()
        joined = {caller.number for caller in self._agents()}
        for caller in list(self._callers.values()):
            if (caller.number in joined or caller.has_asked) and not caller.closing:
                caller.used_at = now
            elif now - caller.used_at > JOINED_SECONDS:
                logger.warning("connection %d is closed: it took no part", caller.number)
                self._end(caller)

    # The command line

    def _answer(self, caller: _Caller, message: Message) -> None:
        match message.get("do"):
            case "nodes":
                head = {
                    "address": self.record.address,
                    "versions": dict(self._membership.versions),
                    "replaces": self.record.replaces,
                }
                self._send(caller, {**self._list_members(), "head": head})
            case "check":
                self._next_number += 1
                agents = {each.number: self._node_of(each) for each in self._agents()}
                self._checks.begin(self._next_number, caller.number, agents, time.monotonic())
                for each in self._agents():
                    self._send(each, {"do": "check", "number": self._next_number})
            case "drain":
                node = NodeId(str(message.get("node")))
                seconds = parse_seconds("seconds", message.get("seconds"))
                self._drain(caller, node, None if message.get("cancel") is True else seconds)
            case "engine":
                self._forward_engine(caller, message)
            case "unpin" | "run" | "input" | "interrupt" as kind:
                try:
                    if kind == "unpin":
                        Catalog(self._paths).unpin(str(message.get("job")))
                        self._send(caller, {"do": "unpin"})
                    else:
                        self._relays.handle(caller.number, message)
                except (ClusterError, GridError) as error:
                    self._send(caller, {"error": str(error)})
            case "replaced":
                record_replacement(self._paths, self.record, message)
                self._send(caller, {"do": "replaced"})
                self._stopping = True
            case "down":
                self._begin_down(caller, delete=message.get("delete") is True)
            case other:
                self._send(caller, {"error": f"The head doesn't know this. Received: {other!r:.80}"})

    def _drain(self, caller: _Caller, node: NodeId, seconds: float | None) -> None:
        """Have a node leave within so many seconds, or stay (None). Say why if that can't be."""
        why = membership.find_obstacle_to_draining(self._membership, node, cancel=seconds is None)
        if why:
            logger.warning("not drained: %s", why)
            self._send(caller, {"do": "drain", "refused": why})
            return
        event = membership.DrainingCancelled(node) if seconds is None else membership.Draining(node, seconds)
        logger.info("%s stays" if seconds is None else "%s is to leave", node)
        self._decide(event)
        self._send(caller, {"do": "drain", "state": self._membership.members[node].state})

    def _forward_engine(self, caller: _Caller, message: Message) -> None:
        """Have the agent of a node start a server for the tasks of a job."""
        node = message.get("node")
        agent = next((each for each in self._agents() if self._node_of(each) == node), None)
        if agent is None:
            member = self._membership.members.get(NodeId(str(node)))
            state = member.state if member is not None else "unknown"
            self._send(caller, {"error": f"the agent of {node!r:.100} is {state} to the head"})
            return
        order = {"do": "engine", **{name: message.get(name) for name in ("job", "address", "has_place")}}
        self._send(agent, order)
        self._send(caller, {"do": "engine"})

    def _node_of(self, caller: _Caller) -> NodeId:
        member = self._membership.find(caller.number)
        return member.facts.node if member is not None else NodeId("")

    def _begin_down(self, *asking: _Caller, delete: bool) -> None:
        """Have all agents end, and then the head, which answers `asking`."""
        if self.lead is not None:
            self.lead.resign(down=True)  # before agents end members of etcd
        waiting = self._down[0] if self._down else []
        self._down = ([*waiting, *asking], time.monotonic() + DOWN_SECONDS)
        for agent in self._agents():
            self._send(agent, {"do": "stop", "delete": delete})

    def _advance_down(self) -> None:
        """Answer who has asked for the end, once all agents have ended or the time is up; then end."""
        if self._down is None:
            return
        waiting, deadline = self._down
        left = [m for m in self._membership.members.values() if m.connection is not None]
        if left and time.monotonic() < deadline:
            return
        members = self._membership.members.values()
        answer: dict[str, Any] = {
            "do": "down",
            "ended": sorted(m.facts.node for m in members if m.state == "left"),
            "unreachable": sorted(m.facts.node for m in members if m.state != "left"),
        }
        for caller in waiting:
            self._send(caller, answer)
        self.went_down = True
        self._down = [], 0.0
        # One that the head runs for a caller has more to do, and to say.
        self._stopping = not self._relays.is_running("down")


# Questions to all agents which of the others they can't reach, until all have answered


@dataclass(slots=True)
class _Check:
    """One question."""

    #: Distinguishes its answers from those to an earlier question.
    number: int
    #: The connection that wants to know it.
    asking: int
    #: The agents that haven't answered yet, by connection.
    waiting: dict[int, NodeId]
    #: When those that have said nothing are named, on the monotonic clock.
    deadline: float
    #: (from, to, why) of each pair that can't talk.
    pairs: list[tuple[str, str, str]] = field(default_factory=list)


class ReachChecks:
    """The questions that haven't been answered yet."""

    def __init__(self) -> None:
        self._checks: list[_Check] = []

    def begin(self, number: int, asking: int, agents: dict[int, NodeId], now: float) -> None:
        """Note a question to `agents`, by connection, on behalf of the connection `asking`."""
        self._checks.append(_Check(number, asking, agents, now + CHECK_SECONDS))

    def note(self, number: object, connection: int, unreachable: dict[str, str]) -> None:
        """Note the answer of an agent."""
        for check in self._checks:
            if check.number == number and connection in check.waiting:
                node = check.waiting.pop(connection)
                check.pairs += [(node, to, why) for to, why in unreachable.items()]

    def take_answers(self, connected: Container[int], now: float) -> list[tuple[int, Message]]:
        """Return (connection, answer) for questions that all `connected` agents have answered, and for those
        whose time is up."""
        answers = []
        for check in list(self._checks):
            late = {n: node for n, node in check.waiting.items() if n in connected}
            if late and now < check.deadline:
                continue
            self._checks.remove(check)
            answer = {"do": "check", "pairs": sorted(check.pairs), "silent": sorted(late.values())}
            answers.append((check.asking, answer))
        return answers
