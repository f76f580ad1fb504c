"""How agents, heads and commands reach each other, and what they write down of it. Begin reading with
`messages.py`, then `connection.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.wire.addresses import (
        choose_head_address,
        family_of,
        find_route_source,
        resolve_interface,
    )
    from insitu.cluster.wire.connection import (
        Acceptor,
        HeadConnection,
        HeadUnreachable,
        answers_as_head,
        ask_head,
        check_role,
        dial,
        dial_head,
        open_listener,
        say_farewell,
    )
    from insitu.cluster.wire.detached import open_input, open_log, report_ready, start_detached
    from insitu.cluster.wire.facts import gather_facts, list_gpus, measure_load, read_versions
    from insitu.cluster.wire.host_environment import (
        FOR_TASKS,
        adapt_environment,
        is_of_host,
        is_of_insitu,
        is_of_session,
    )
    from insitu.cluster.wire.hosts_file import HostLine, parse_hosts
    from insitu.cluster.wire.launching import (
        SSH,
        START_SECONDS,
        Outcome,
        check_launcher,
        make_member_command,
        make_start_command,
        make_stop_command,
        make_view_command,
        run_on_hosts,
    )
    from insitu.cluster.wire.messages import (
        CatalogParts,
        CatalogVersion,
        Message,
        TextsByName,
        encode_end,
        encode_imports,
        encode_inventory,
        encode_members,
        identify_catalog,
        parse_end,
        parse_facts,
        parse_imports,
        parse_inventory,
        parse_job_order,
        parse_load,
        parse_members,
        parse_seconds,
        split_catalog,
    )
    from insitu.cluster.wire.node_list import (
        ask_for_nodes,
        describe_replacement,
        find_head,
        find_successor,
        read_nodes,
        read_replacement,
        wait_for_record,
    )
    from insitu.cluster.wire.options import (
        CHECK_SECONDS,
        HOSTS_ENGINE,
        JOIN_SECONDS,
        AgentOptions,
        choose_copy_rate,
    )
    from insitu.cluster.wire.pins import list_jobs_elsewhere, release_pins
    from insitu.cluster.wire.process_log import MAX_LOG_BYTES, damage_logged, keep_log_bounded
    from insitu.cluster.wire.reachability import PROBE_BYTES, find_lost_packets, find_unreachable
    from insitu.cluster.wire.records import (
        AgentRecord,
        HeadRecord,
        LockHolder,
        change_head,
        check_record_owner,
        check_token,
        find_head_of_agents,
        is_locked,
        is_orphaned,
        is_own_folder,
        list_agents,
        make_token,
        open_holder,
        read_agent,
        read_head,
        read_holder,
        read_token,
        read_token_file,
        start_record,
        take_process_lock,
        write_agent,
        write_head,
        write_token,
    )
    from insitu.cluster.wire.relays import (
        CLUSTER_ENV,
        PART_BYTES,
        RELAYED,
        TOKEN_FILE_ENV,
        Relays,
        make_request,
    )
    from insitu.cluster.wire.remote import run_at_head
    from insitu.cluster.wire.saved_members import (
        read_kept_members,
        read_saved_members,
        resume_members,
        save_members,
    )

__getattr__, __dir__ = export_lazily(__name__)
