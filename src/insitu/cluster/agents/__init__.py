"""Agents on the hosts of a cluster, and the head that knows them.

The decisions are pure, in `decide/membership.py`. Begin reading with `agent.py`, then `head.py`; `hosts.py`
is what `insitu up --hosts` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.agents.agent import run_agent
    from insitu.cluster.agents.home import delete_store, stop_agents
    from insitu.cluster.agents.hosts import (
        DownReport,
        HostRequest,
        bring_up_hosts,
        find_separated,
        read_hosts_file,
        read_nodes,
        start_agent,
        stop_report,
        take_down_hosts,
    )
    from insitu.cluster.agents.launching import SSH, Outcome
    from insitu.cluster.agents.options import AgentOptions
    from insitu.cluster.agents.records import read_head, read_token

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "agent": ("run_agent",),
        "home": ("delete_store", "stop_agents"),
        "hosts": (
            "DownReport",
            "HostRequest",
            "bring_up_hosts",
            "find_separated",
            "read_hosts_file",
            "read_nodes",
            "start_agent",
            "stop_report",
            "take_down_hosts",
        ),
        "launching": ("SSH", "Outcome"),
        "options": ("AgentOptions",),
        "records": ("read_head", "read_token"),
    },
)

__all__ = [
    "SSH",
    "AgentOptions",
    "DownReport",
    "HostRequest",
    "Outcome",
    "bring_up_hosts",
    "delete_store",
    "find_separated",
    "read_head",
    "read_hosts_file",
    "read_nodes",
    "read_token",
    "run_agent",
    "start_agent",
    "stop_agents",
    "stop_report",
    "take_down_hosts",
]
