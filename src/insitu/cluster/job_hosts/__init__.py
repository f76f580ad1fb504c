"""The server of a host that runs tasks of jobs. Begin reading with `host_server.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.job_hosts.home import (
        ReplacedHead,
        check_home,
        choose_node,
        delete_store,
        end_process,
        find_running,
        remove_new_store,
        set_aside_store,
        stop_agents,
    )
    from insitu.cluster.job_hosts.places import keep_server
    from insitu.cluster.job_hosts.task_servers import (
        TaskServers,
        remove_host_copy,
        start_server,
        sweep_jobs,
    )
    from insitu.cluster.job_hosts.tied import POLL_SECONDS, identify_parent, tie_to

__getattr__, __dir__ = export_lazily(__name__)
