"""The decisions about jobs, all pure: (state, event, now) to a new state and actions.

No clock, thread, socket, process or file. Begin reading with `job.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.decide import holders, membership
    from insitu.cluster.decide.drain_notices import DrainNode, KeepNode, plan_drains
    from insitu.cluster.decide.environment import (
        build_task_environment,
    )
    from insitu.cluster.decide.events import (
        Action,
        ControllerLostEvent,
        DataMovedEvent,
        Event,
        Finish,
        Launch,
        LaunchedEvent,
        LaunchFailedEvent,
        LeaveEvent,
        LeftAloneEvent,
        Log,
        MoveEvent,
        PeersLostEvent,
        Publish,
        ReadyEvent,
        RecoveredEvent,
        Reply,
        ResumedEvent,
        ScaleRequestedEvent,
        Signal,
        StalledEvent,
        StopRequestedEvent,
        SubmittedEvent,
        TakenOverEvent,
        TaskExitedEvent,
        TickEvent,
    )
    from insitu.cluster.decide.fencing import (
        EPOCHS_OF_A_NUMBER,
        AgentView,
        Claim,
        choose_next_epoch,
        find_cluster_number,
        find_obstacle_to_replacing,
        is_replaced,
        may_accept,
    )
    from insitu.cluster.decide.file_placement import (
        RepairPlan,
        plan_repair,
        rank_nodes,
    )
    from insitu.cluster.decide.goodput import (
        PRODUCTIVE,
        TaskAccount,
        account_for_tasks,
        average,
        find_absences,
        find_lives,
    )
    from insitu.cluster.decide.host_loss import (
        SILENT_SECONDS,
        VANISHED_SECONDS,
        HostSigns,
        HostWatch,
    )
    from insitu.cluster.decide.idle_workers import (
        IdleWatch,
        find_left_alone,
    )
    from insitu.cluster.decide.job import (
        advance,
        new_job,
    )
    from insitu.cluster.decide.job_copies import (
        CopyVersion,
        choose_copy_holders,
        choose_newest_copy,
    )
    from insitu.cluster.decide.job_json import (
        decode_job,
        encode_action,
        encode_event,
        encode_job,
    )
    from insitu.cluster.decide.job_state import (
        ENDED,
        EVALUATOR_GRACE,
        EpochStep,
        Failure,
        JobState,
        TaskState,
    )
    from insitu.cluster.decide.layout import (
        assign_contiguous_shards,
        find_shard_holders,
        find_successors,
    )
    from insitu.cluster.decide.leadership import (
        HEAD_LEASE_SECONDS,
        KEEP_SECONDS,
        Candidacy,
        Hold,
        Kept,
        Lost,
        SeenKey,
        Unanswered,
        advance_hold,
        choose_as_agent,
    )
    from insitu.cluster.decide.losses import (
        Loss,
        find_losses,
    )
    from insitu.cluster.decide.membership import (
        AgentFacts,
        AgentLoad,
        Member,
        Membership,
        describe_state,
    )
    from insitu.cluster.decide.moves import (
        Ownership,
        find_ownership,
        plan_moves,
    )
    from insitu.cluster.decide.placement import (
        choose_thread_count,
        choose_worker_count,
        make_empty_cache,
        place_tasks,
    )
    from insitu.cluster.decide.re_replication import (
        CopyOrder,
        CopyOrders,
        find_copy_order,
        find_departed,
    )
    from insitu.cluster.decide.recovery_progress import (
        find_disconnected,
        find_furthest,
        find_ready_to_join,
        find_waiting_for_ended,
        has_recovered,
    )
    from insitu.cluster.decide.stall import (
        StallWatch,
    )
    from insitu.cluster.decide.stragglers import (
        Straggler,
        find_stragglers,
    )
    from insitu.cluster.decide.supervision import (
        JOB_LEASE_SECONDS,
        Starts,
        SupervisedJob,
        choose_starts,
        count_seconds_left,
    )

__getattr__, __dir__ = export_lazily(__name__)
