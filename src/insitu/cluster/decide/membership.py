"""Decides which agents belong to the cluster: who may join, who is alive, who is lost.

`decide` maps (membership, event, now) to a new membership and actions; the head performs these
(`cluster/nodes`). `now` is the head's monotonic clock. `wall` is the time since 1970: people read it,
and nothing but the refusal of clocks that are wrong is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

from insitu.base.spec import NodeId
from insitu.base.typed import Count, Port, Seconds, Text

SILENT_SECONDS = 5.0
"""Seconds without a word after which an agent counts as silent."""
LOST_SECONDS = 15.0
"""Seconds without a word after which an agent counts as lost."""
MAX_CLOCK_SKEW = 60.0
"""Seconds that the clocks of two machines of a cluster may differ by."""
_MOST_SHOWN = 1000
"""Characters of a reason that are kept: it has what the agent says about itself."""
REQUIRED_VERSIONS = ("insitu", "python")
"""Packages whose versions each agent must name. Others are compared if both sides have them."""

AgentState = Literal["alive", "silent", "lost", "left"]
LongText = Annotated[str, Meta(max_length=16 << 10)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=1024)]
Versions = Annotated[Mapping[Text, Text], Meta(max_length=1024)]


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Facts that stay the same while an agent's process lives."""

    #: The name of the node whose store it owns.
    node: NodeId
    #: The id of the store, which stays on its disk.
    store: LongText
    #: The folder of the store on its host.
    folder: LongText
    #: Drawn when the process was started.
    process: LongText
    #: The name of the host.
    host: LongText
    #: The numeric address at which it serves partitions.
    address: LongText
    #: The port there.
    port: Port
    #: The certificate by which the server is recognized, as PEM.
    certificate: LongText
    #: Versions by the name of what they are of; those of REQUIRED_VERSIONS are there.
    versions: Versions
    #: Processors that the agent may use.
    cores: Count
    #: The model of each GPU.
    gpus: Texts
    #: Bytes of memory.
    memory: Count
    #: Bytes of the device of the store.
    disk: Count
    #: The model of the processor; empty if it isn't known.
    processor: LongText
    #: The host's time since 1970 when the agent joined.
    clock: Seconds


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """Facts that change while an agent lives."""

    #: Bytes of memory that processes may still get.
    memory_available: Count
    #: Bytes that are free on the device of the store.
    disk_free: Count
    #: Versions in the store that the catalogue doesn't know.
    unknown_versions: Count


@dataclass(frozen=True, slots=True)
class Member:
    """An agent that has joined at some time."""

    #: Its constant facts.
    facts: AgentFacts
    #: Its last report.
    load: AgentLoad
    #: How it is.
    state: AgentState
    #: Since when it is so, in seconds since 1970; for people.
    since: Seconds
    #: When its last word came, on the head's monotonic clock.
    heard: Seconds
    #: The number of its connection; None: it has none.
    connection: Count | None
    #: Seconds that its clock is ahead of the head's.
    clock_skew: Seconds
    #: Deadline by which it must have left, in seconds since 1970; None: it stays. A node that leaves gets no
    #: data and no tasks, and what it has moves to others.
    leave_by: Seconds | None = None
    #: Whether nothing is on it any more that others need; only of a node that leaves.
    is_empty: bool = False
    #: Why its agent, which has no connection, wasn't let in when it asked last; "": it was.
    refused: Text = ""


@dataclass(frozen=True, slots=True)
class Membership:
    """The agents of a cluster."""

    #: The versions of the head.
    versions: Mapping[str, str]
    #: By the name of the node.
    members: Mapping[NodeId, Member] = field(default_factory=dict)
    #: The stores in the head's own home: their ids by the name of the node.
    local_stores: Mapping[NodeId, str] = field(default_factory=dict)

    @property
    def leaving(self) -> tuple[NodeId, ...]:
        """The nodes that are to leave, by name."""
        return tuple(sorted(node for node, m in self.members.items() if m.leave_by is not None))

    def find(self, connection: int) -> Member | None:
        """Return the member with this connection."""
        return next((m for m in self.members.values() if m.connection == connection), None)


@dataclass(frozen=True, slots=True)
class Joining:
    """An agent that has proved the secret asks to join."""

    #: The number of its connection.
    connection: int
    #: Its constant facts.
    facts: AgentFacts
    #: Its first report.
    load: AgentLoad
    #: Seconds since its first attempt to join.
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Heard:
    """An agent has said that it is alive."""

    #: The number of its connection.
    connection: int
    #: Its report.
    load: AgentLoad


@dataclass(frozen=True, slots=True)
class Ended:
    """A connection has ended. `leaving`: the agent said before that it ends."""

    #: The number of the connection.
    connection: int
    #: Whether the agent said that it ends.
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Draining:
    """Somebody wants a node to leave, its host is about to be withdrawn, or it is lost for good."""

    #: The node.
    node: NodeId
    #: Seconds within which it must have left.
    seconds: float


@dataclass(frozen=True, slots=True)
class DrainingCancelled:
    """A node stays after all."""

    #: The node.
    node: NodeId


@dataclass(frozen=True, slots=True)
class Checked:
    """It was found out whether something is on a node that leaves which others need."""

    #: The node.
    node: NodeId
    #: Whether nothing is.
    is_empty: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Joining | Heard | Ended | Draining | DrainingCancelled | Checked | Tick


@dataclass(frozen=True, slots=True)
class Admit:
    """Let the agent in."""

    #: The number of its connection.
    connection: int
    #: The name of its node.
    node: NodeId
    #: The name that the node of this store had before; None: the same, or none.
    formerly: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Say why the agent can't join, and close its connection."""

    #: The number of its connection.
    connection: int
    #: The rule, what was received, what to do.
    reason: str
    #: Whether the reason may be over soon, so that the agent tries again.
    again: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection whose agent counts as lost, or has another connection now."""

    connection: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Send a word on a connection. If its host has started again since, the connection ends by that."""

    connection: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Save the list of members, and send it to all of them."""


Action = Admit | Refuse | Close | Probe | Changed


def decide(
    membership: Membership, event: Event, now: float, wall: float
) -> tuple[Membership, tuple[Action, ...]]:
    """Return the membership after `event`, and the actions that follow."""
    match event:
        case Joining():
            return _join(membership, event, now, wall)
        case Heard():
            member = membership.find(event.connection)
            if member is None:
                return membership, ()
            returned = member.state == "silent"
            member = replace(member, load=event.load, heard=now)
            if returned:
                member = replace(member, state="alive", since=wall)
            return _with(membership, member), (Changed(),) if returned else ()
        case Ended():
            member = membership.find(event.connection)
            if member is None:
                return membership, ()
            state: AgentState = "left" if event.leaving else "lost"
            member = replace(member, state=state, since=wall, connection=None)
            return _with(membership, member), (Changed(),)
        case Draining():
            return _drain(membership, event, wall)
        case DrainingCancelled():
            return _set_leaving(membership, event.node, None, is_empty=False)
        case Checked():
            return _record_check(membership, event, wall)
        case Tick():
            return _pass_time(membership, now, wall)


def _with(membership: Membership, *members: Member) -> Membership:
    changed = {member.facts.node: member for member in members}
    return replace(membership, members={**membership.members, **changed})


def _drain(membership: Membership, event: Draining, wall: float) -> tuple[Membership, tuple[Action, ...]]:
    """Have a node leave. Asked again, it must leave by the earlier time."""
    found = membership.members.get(event.node)
    until = wall + event.seconds
    if found is not None and found.leave_by is not None:
        until = min(until, found.leave_by)
    return _set_leaving(membership, event.node, until, found is not None and found.is_empty)


def _set_leaving(
    membership: Membership, node: NodeId, leave_by: float | None, is_empty: bool
) -> tuple[Membership, tuple[Action, ...]]:
    member = membership.members.get(node)
    if member is None or (member.leave_by, member.is_empty) == (leave_by, is_empty):
        return membership, ()
    return _with(membership, replace(member, leave_by=leave_by, is_empty=is_empty)), (Changed(),)


def _record_check(
    membership: Membership, event: Checked, wall: float
) -> tuple[Membership, tuple[Action, ...]]:
    """Note whether a node that leaves is empty. A lost one has left then: it counts no more if most of the
    nodes are needed."""
    member = membership.members.get(event.node)
    if member is None or member.leave_by is None:
        return membership, ()
    if member.state == "lost" and event.is_empty:
        return _with(membership, replace(member, state="left", since=wall, is_empty=True)), (Changed(),)
    return _set_leaving(membership, event.node, member.leave_by, event.is_empty)


def describe_state(member: Member) -> str:
    """Return how a node is: its agent's state, or `draining` and then `drained` if it leaves."""
    if member.leave_by is None or member.state not in ("alive", "silent"):
        return member.state
    return "drained" if member.is_empty else "draining"


def find_obstacle_to_draining(membership: Membership, node: NodeId, *, cancel: bool = False) -> str:
    """Return why a node can't leave: the rule, what was received, what to do; "" if it can."""
    if node not in membership.members:
        known = ", ".join(sorted(membership.members)) or "none"
        return f"A node that leaves is one of the cluster. Received: {node}; its nodes are {known}"
    if cancel:
        return ""
    stay = [
        m for n, m in membership.members.items() if n != node and m.state == "alive" and m.leave_by is None
    ]
    if not stay:
        return (
            f"What a node has moves to others before it leaves, so one must stay. Received: {node}, and no "
            f"other node that is alive and stays. Bring another one up first"
        )
    return ""


def _pass_time(membership: Membership, now: float, wall: float) -> tuple[Membership, tuple[Action, ...]]:
    actions: list[Action] = []
    for member in membership.members.values():
        quiet = now - member.heard
        if member.state in ("alive", "silent") and quiet > LOST_SECONDS:
            if member.connection is not None:
                actions.append(Close(member.connection))
            member = replace(member, state="lost", since=wall, connection=None)
        elif member.state == "alive" and quiet > SILENT_SECONDS:
            member = replace(member, state="silent", since=wall)
        else:
            continue
        membership = _with(membership, member)
        actions.append(Changed())
    return membership, tuple(dict.fromkeys(actions))


def _join(
    membership: Membership, event: Joining, now: float, wall: float
) -> tuple[Membership, tuple[Action, ...]]:
    facts = event.facts
    skew = facts.clock - wall
    if reason := _find_lasting_obstacle(membership, facts, skew):
        return _refuse_lastingly(membership, event, reason)
    if membership.find(event.connection) is not None:
        return membership, (Refuse(event.connection, "An agent joins once. Received: a second time"),)
    actions: list[Action] = []
    for rival in membership.members.values():
        connection = rival.connection
        if connection is None or not _is_rival(rival, facts):
            continue
        if rival.facts.process != facts.process:
            # One that has spoken since the first attempt is alive. Another one may be dead already.
            again = rival.heard <= now - event.waited
            return membership, (
                Refuse(event.connection, _describe_rival(rival, facts), again),
                Probe(connection),
            )
        actions.append(Close(connection))  # the agent has lost it before this process noticed
    former = [m.facts.node for m in membership.members.values() if m.facts.store == facts.store]
    leave_by = next((m.leave_by for m in map(membership.members.get, former) if m is not None), None)
    others = {node: member for node, member in membership.members.items() if node not in former}
    joined = Member(facts, event.load, "alive", wall, now, event.connection, skew, leave_by)
    formerly = next((node for node in former if node != facts.node), None)
    actions += [Admit(event.connection, facts.node, formerly), Changed()]
    return replace(membership, members={**others, facts.node: joined}), tuple(actions)


def _refuse_lastingly(
    membership: Membership, event: Joining, reason: str
) -> tuple[Membership, tuple[Action, ...]]:
    """Refuse an agent, and note why if it was a member before: else people only see that it is lost."""
    refusal, known = Refuse(event.connection, reason), membership.members.get(event.facts.node)
    if known is None or known.facts.store != event.facts.store or known.connection is not None:
        return membership, (refusal,)
    return _with(membership, replace(known, refused=reason[:_MOST_SHOWN])), (refusal, Changed())


def _is_rival(member: Member, facts: AgentFacts) -> bool:
    """Return whether both can't be members at the same time."""
    return member.facts.node == facts.node or member.facts.store == facts.store


def _describe_rival(rival: Member, facts: AgentFacts) -> str:
    where = f"{rival.facts.host} ({rival.facts.address})"
    if rival.facts.store == facts.store:
        return (
            f"Each store has one agent. Received: store {facts.store} from {facts.host} ({facts.address}), "
            f"which {where} serves as {rival.facts.node}. If one disk is a copy of the other, remove the "
            f"file store-id in {facts.folder}, and it is a store of its own"
        )
    return (
        f"Each node has a name of its own. Received: {facts.node} from {facts.host} ({facts.address}), which "
        f"is the name of {where}. Give the agent another one by --name"
    )


def _find_lasting_obstacle(membership: Membership, facts: AgentFacts, skew: float) -> str:
    """Return why the agent can't join until somebody changes something; "" if it can."""
    if different := find_differences(_reference_versions(membership), facts.versions):
        return (
            f"All nodes need the same versions. Received: {facts.host} has {', '.join(different)}. Install "
            f"the same ones there"
        )
    if membership.local_stores.get(facts.node, facts.store) != facts.store:
        return (
            f"Each node has a name of its own. Received: {facts.node} from {facts.host} ({facts.address}), "
            f"which is the name of a store in the home of the head. Give the agent another one by --name"
        )
    if abs(skew) > MAX_CLOCK_SKEW:
        side = "ahead of" if skew > 0 else "behind"
        return (
            f"The clocks of nodes differ by {MAX_CLOCK_SKEW:g} s at most. Received: {facts.host}, which is "
            f"{abs(skew):.0f} s {side} the head. Set its clock, as by a time server"
        )
    return ""


def _reference_versions(membership: Membership) -> dict[str, str]:
    """Return the versions that all must have: those of the head, and what members have beside them."""
    found = dict(membership.versions)
    for member in membership.members.values():
        if member.connection is not None:
            found = {**member.facts.versions, **found}
    return found


def find_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return what differs as text, such as "python 3.12 instead of 3.11"."""
    return [
        f"{name} {found.get(name, 'none')} instead of {expected[name]}"
        for name in sorted(expected)
        if (name in found or name in REQUIRED_VERSIONS) and found.get(name) != expected[name]
    ]


def resume_membership(membership: Membership, now: float) -> Membership:
    """Return the membership that an earlier head has left. Its agents have until they count as lost to come
    back."""
    kept = [
        replace(m, state="silent" if m.state == "alive" else m.state, heard=now, connection=None)
        for m in membership.members.values()
    ]
    return _with(membership, *kept)


def validate_membership(membership: Membership) -> None:
    """Raise ValueError if the membership can't be."""
    stores = [member.facts.store for member in membership.members.values()]
    connections = [m.connection for m in membership.members.values() if m.connection is not None]
    if len(set(stores)) != len(stores) or len(set(connections)) != len(connections):
        raise ValueError("two members have the same store or connection")
    for node, member in membership.members.items():
        if member.facts.node != node:
            raise ValueError(f"{member.facts.node} is listed as {node}")
        if member.connection is not None and member.state not in ("alive", "silent"):
            raise ValueError(f"{node} is {member.state} and has a connection")
        if member.is_empty and member.leave_by is None:
            raise ValueError(f"{node} counts as empty and isn't to leave")
        if member.connection is None and member.state == "alive":
            raise ValueError(f"{node} is alive without a connection")
