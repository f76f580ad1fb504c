"""Agents on the hosts of a cluster, and the head that knows them.

The decisions are pure, in `decide/membership.py`. Begin reading with `agent.py`, then `head.py`; `hosts.py`
is what `insitu up --hosts` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.agents.agent import run_agent
    from insitu.cluster.agents.agent_files import make_file_view
    from insitu.cluster.agents.facts import read_versions
    from insitu.cluster.agents.home import delete_store, stop_agents
    from insitu.cluster.agents.host_environment import is_of_host, is_of_session
    from insitu.cluster.agents.hosts import (
        DownReport,
        HostRequest,
        bring_up_head,
        bring_up_hosts,
        check_unled,
        find_separated,
        read_hosts_file,
        start_agent,
        stop_report,
    )
    from insitu.cluster.agents.hosts_engine import open_hosts_engine
    from insitu.cluster.agents.job_code_copy import unpack_code
    from insitu.cluster.agents.job_copy_reading import open_copy_reader
    from insitu.cluster.agents.job_terms import draw_term, write_term
    from insitu.cluster.agents.launching import SSH, Outcome
    from insitu.cluster.agents.node_draining import cancel_draining, drain_node, find_own_node
    from insitu.cluster.agents.node_list import ask_for_nodes, read_nodes, read_taking_over
    from insitu.cluster.agents.options import HOSTS_ENGINE, AgentOptions, choose_copy_rate
    from insitu.cluster.agents.ray_hosts import RayRequest, bring_up_ray, take_down_cluster
    from insitu.cluster.agents.records import (
        change_head,
        find_head_of_agents,
        read_head,
        read_token,
        read_token_file,
    )
    from insitu.cluster.agents.relays import CLUSTER_ENV, RELAYED, TOKEN_FILE_ENV
    from insitu.cluster.agents.remote import run_at_head
    from insitu.cluster.agents.saved_members import read_kept_members, read_saved_members
    from insitu.cluster.agents.stores import find_known_stores, find_owners, find_stores
    from insitu.cluster.agents.take_over import take_over_head
    from insitu.cluster.agents.tied import identify_parent

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "agent": ("run_agent",),
        "agent_files": ("make_file_view",),
        "home": ("delete_store", "stop_agents"),
        "facts": ("read_versions",),
        "host_environment": ("is_of_host", "is_of_session"),
        "hosts": (
            "DownReport",
            "HostRequest",
            "bring_up_head",
            "bring_up_hosts",
            "check_unled",
            "find_separated",
            "read_hosts_file",
            "start_agent",
            "stop_report",
        ),
        "hosts_engine": ("open_hosts_engine",),
        "job_code_copy": ("unpack_code",),
        "job_copy_reading": ("open_copy_reader",),
        "job_terms": ("draw_term", "write_term"),
        "launching": ("SSH", "Outcome"),
        "node_draining": ("cancel_draining", "drain_node", "find_own_node"),
        "node_list": ("ask_for_nodes", "read_nodes", "read_taking_over"),
        "options": ("HOSTS_ENGINE", "AgentOptions", "choose_copy_rate"),
        "ray_hosts": ("RayRequest", "bring_up_ray", "take_down_cluster"),
        "saved_members": ("read_kept_members", "read_saved_members"),
        "stores": ("find_known_stores", "find_owners", "find_stores"),
        "records": ("change_head", "find_head_of_agents", "read_head", "read_token", "read_token_file"),
        "relays": ("CLUSTER_ENV", "RELAYED", "TOKEN_FILE_ENV"),
        "remote": ("run_at_head",),
        "take_over": ("take_over_head",),
        "tied": ("identify_parent",),
    },
)

__all__ = [
    "CLUSTER_ENV",
    "HOSTS_ENGINE",
    "RELAYED",
    "SSH",
    "TOKEN_FILE_ENV",
    "AgentOptions",
    "DownReport",
    "HostRequest",
    "Outcome",
    "RayRequest",
    "ask_for_nodes",
    "bring_up_head",
    "bring_up_hosts",
    "bring_up_ray",
    "cancel_draining",
    "change_head",
    "check_unled",
    "choose_copy_rate",
    "delete_store",
    "drain_node",
    "draw_term",
    "find_head_of_agents",
    "find_known_stores",
    "find_own_node",
    "find_owners",
    "find_separated",
    "find_stores",
    "identify_parent",
    "is_of_host",
    "is_of_session",
    "make_file_view",
    "open_copy_reader",
    "open_hosts_engine",
    "read_head",
    "read_hosts_file",
    "read_kept_members",
    "read_nodes",
    "read_saved_members",
    "read_taking_over",
    "read_token",
    "read_token_file",
    "read_versions",
    "run_agent",
    "run_at_head",
    "start_agent",
    "stop_agents",
    "stop_report",
    "take_down_cluster",
    "take_over_head",
    "unpack_code",
    "write_term",
]
