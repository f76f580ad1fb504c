"""What an agent is given when it is started, and times that several processes know. Loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HOSTS_ENGINE = "hosts"
"""The name of the engine that runs tasks on hosts, in a job's specification."""
CHECK_SECONDS = 20.0
"""Seconds in which agents say whom they can't reach: longer than they try."""
JOIN_SECONDS = 20.0
"""Seconds in which a new agent joins, or says why it can't: longer than a head takes to notice that the
connection of the agent before it is dead."""


_COPY_RATE_PER_CORE = 5e6
"""Bytes a second. To encrypt, send, receive and check one takes about 10 ns of a processor, so this is a
twentieth of each core."""
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


def choose_copy_rate(cores: Iterable[int]) -> float:
    """Return the bytes a second that all nodes together receive of copies, unless somebody says otherwise.
    Running jobs continue beside that. `cores` are those of each node that is alive."""
    return max(1, min(cores, default=1)) * _COPY_RATE_PER_CORE
