"""Agents on the hosts of a cluster, and the head that knows them.

The decisions are pure, in `decide/membership.py`. Begin reading with `agent.py`, then `head.py`; `hosts.py`
is what `insitu up --hosts` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.nodes.agent_process import run_agent
    from insitu.cluster.nodes.head_files import make_file_view
    from insitu.cluster.nodes.head_process import run_head
    from insitu.cluster.nodes.head_replacing import describe_views, replace_head
    from insitu.cluster.nodes.hosts import (
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
    from insitu.cluster.nodes.node_draining import (
        ask_to_drain,
        cancel_draining,
        drain_node,
        find_own_node,
    )
    from insitu.cluster.nodes.ray_hosts import RayRequest, bring_up_ray, take_down_cluster

__getattr__, __dir__ = export_lazily(__name__)
