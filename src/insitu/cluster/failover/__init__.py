"""Finds or becomes the next head, and keeps the etcd that says which it is. Begin reading with
`head_metadata.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.failover.etcd_member import MemberKeeper, do_about_member, stop_member
    from insitu.cluster.failover.etcd_members import OWN_ETCD, HostCommands, check_members
    from insitu.cluster.failover.head_finding import HeadFinder, leave_if_replaced, open_agents
    from insitu.cluster.failover.head_metadata import (
        begin_to_lead,
        bring_up_members,
        drop_cluster,
        end_cluster,
        end_leading,
        prepare_etcd,
    )
    from insitu.cluster.failover.head_starting import start_head
    from insitu.cluster.failover.head_watch import HeadWatch
    from insitu.cluster.failover.metadata_moving import EMBEDDED, MovePlan, move_metadata, move_with_members

__getattr__, __dir__ = export_lazily(__name__)
