"""What an agent is given when it is started, and times that several processes know. Loads nothing."""

from __future__ import annotations

from dataclasses import dataclass

HOSTS_ENGINE = "hosts"
"""The name of the engine that runs tasks on hosts, in a job's specification."""
CHECK_SECONDS = 20.0
"""Seconds in which agents say whom they can't reach: longer than they try."""
JOIN_SECONDS = 20.0
"""Seconds in which a new agent joins, or says why it can't: longer than a head takes to notice that the
connection of the agent before it is dead."""


COPY_RATE = 100e6
"""Bytes a second that all nodes together receive of copies, at most, unless somebody says otherwise: running
jobs go on beside that."""
COPY_LOST_AFTER = 600.0
"""Seconds after which the copies of a node that is away are made again."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What `insitu agent` was given."""

    #: The head's address, as host:port.
    head: str
    #: The name of the node; empty: that of the store in the home, or of the host.
    name: str = ""
    #: The interface or address to serve at; empty: the one that routes to the head.
    interface: str = ""
    #: The port to serve at; 0: the system chooses.
    port: int = 0
    #: The processes with which the agent ends: the number and the start of each, in clock ticks.
    tied_to: tuple[tuple[int, int], ...] = ()
    #: Seconds that SIGTERM leaves for the node to be drained before the agent ends; 0: it ends at once.
    drain_seconds: float = 0.0
