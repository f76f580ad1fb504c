"""Jobs: where they run, and how they recover from failures.

Inner rooms, each of which may import those to its right: `chaos`, `client`, `control`, `agents`, `files`,
`engines`, `task`, `job_files`, `decide`. Begin reading with `decide/job.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.chaos import (
        FaultInjector,
        InjectedFault,
        find_leftovers,
        plan_faults,
        read_results,
        wait_until_ended,
    )
    from insitu.cluster.client import (
        BrokenJob,
        CurvePoint,
        ExportedModel,
        Goodput,
        InsituFileSystem,
        JobStatus,
        Rates,
        Shell,
        begin_lost_store,
        check_file_size_limit,
        check_job,
        copy_export,
        delete_job,
        end_job,
        find_event_folders,
        find_export,
        find_inherited_settings,
        find_job,
        find_lost_names,
        find_newest,
        find_or_restore_job,
        find_problems,
        find_running_jobs,
        forget_lost_names,
        is_running,
        is_secret,
        list_copied_jobs,
        list_job_ids,
        list_jobs,
        list_outputs,
        measure_goodput,
        measure_job,
        pack_code,
        publish_waiting,
        put_names_back,
        read_curve,
        read_exit_code,
        read_rates,
        read_status,
        resume_job,
        resume_lost_job,
        scale_job,
        stop_job,
        submit,
        summarize_metrics,
        watch_stragglers,
    )
    from insitu.cluster.control import clean_up
    from insitu.cluster.decide import ENDED, describe_state, encode_job
    from insitu.cluster.failover import (
        EMBEDDED,
        OWN_ETCD,
        HostCommands,
        MovePlan,
        check_members,
        do_about_member,
        move_metadata,
        move_with_members,
        stop_member,
    )
    from insitu.cluster.files import NamesReport
    from insitu.cluster.hosts_engine import find_known_stores, find_owners, find_stores
    from insitu.cluster.job_files import (
        Journal,
        MergedLog,
        follow,
        read_options,
        read_placement,
        read_spec,
        split_prefix,
    )
    from insitu.cluster.job_hosts import (
        delete_store,
        identify_parent,
        keep_server,
        start_server,
        stop_agents,
    )
    from insitu.cluster.leases import forget_job
    from insitu.cluster.nodes import (
        DownReport,
        HostRequest,
        RayRequest,
        ask_to_drain,
        bring_up_head,
        bring_up_hosts,
        bring_up_ray,
        cancel_draining,
        check_unled,
        describe_views,
        drain_node,
        find_own_node,
        find_separated,
        read_hosts_file,
        replace_head,
        run_agent,
        run_head,
        start_agent,
        stop_report,
        take_down_cluster,
    )
    from insitu.cluster.wire import (
        CLUSTER_ENV,
        FOR_TASKS,
        PART_BYTES,
        RELAYED,
        SSH,
        TOKEN_FILE_ENV,
        AgentOptions,
        Outcome,
        change_head,
        choose_copy_rate,
        find_head_of_agents,
        is_of_insitu,
        list_gpus,
        list_jobs_elsewhere,
        make_request,
        parse_hosts,
        read_head,
        read_nodes,
        read_replacement,
        read_token,
        read_token_file,
        read_versions,
        release_pins,
        run_at_head,
    )

__getattr__, __dir__ = export_lazily(__name__)
