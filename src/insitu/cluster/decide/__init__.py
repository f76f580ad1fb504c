"""The decisions about jobs, all pure: (state, event, now) to a new state and actions.

No clock, thread, socket, process or file. Begin reading with `job.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.decide import holders, membership, taking_over
    from insitu.cluster.decide.copy_orders import (
        CopyOrder,
        CopyOrders,
        find_copy_order,
        find_departed,
    )
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
        AgentView,
        Claim,
        choose_next_epoch,
        find_missing_majority,
        find_obstacle_to_taking_over,
        may_obey,
    )
    from insitu.cluster.decide.file_placement import (
        RepairPlan,
        choose_holders,
        count_name_copies,
        may_write,
        plan_repair,
        rank_nodes,
    )
    from insitu.cluster.decide.goodput import (
        PRODUCTIVE,
        TaskAccount,
        account_for_tasks,
        average,
        find_lives,
        find_resumes,
    )
    from insitu.cluster.decide.host_loss import (
        SILENT_SECONDS,
        VANISHED_SECONDS,
        HostSigns,
        HostWatch,
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
        place_tasks,
        stand_in_for_cache,
    )
    from insitu.cluster.decide.quiet import (
        QuietWatch,
        find_left_alone,
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

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "environment": ("build_task_environment",),
        "events": (
            "Action",
            "ControllerLostEvent",
            "CopyOrder",
            "CopyOrders",
            "DataMovedEvent",
            "Event",
            "Finish",
            "Launch",
            "LaunchedEvent",
            "LaunchFailedEvent",
            "LeaveEvent",
            "LeftAloneEvent",
            "Log",
            "MoveEvent",
            "PeersLostEvent",
            "Publish",
            "ReadyEvent",
            "RecoveredEvent",
            "Reply",
            "ResumedEvent",
            "ScaleRequestedEvent",
            "Signal",
            "StalledEvent",
            "StopRequestedEvent",
            "SubmittedEvent",
            "TakenOverEvent",
            "TaskExitedEvent",
            "TickEvent",
        ),
        "host_loss": (
            "SILENT_SECONDS",
            "VANISHED_SECONDS",
            "HostSigns",
            "HostWatch",
        ),
        "job": (
            "advance",
            "new_job",
        ),
        "job_copies": (
            "CopyVersion",
            "choose_copy_holders",
            "choose_newest_copy",
        ),
        "job_json": (
            "decode_job",
            "encode_action",
            "encode_event",
            "encode_job",
        ),
        "job_state": (
            "ENDED",
            "EVALUATOR_GRACE",
            "EpochStep",
            "Failure",
            "JobState",
            "TaskState",
        ),
        "fencing": (
            "AgentView",
            "Claim",
            "choose_next_epoch",
            "find_missing_majority",
            "find_obstacle_to_taking_over",
            "may_obey",
        ),
        "file_placement": (
            "RepairPlan",
            "choose_holders",
            "count_name_copies",
            "may_write",
            "plan_repair",
            "rank_nodes",
        ),
        "goodput": (
            "PRODUCTIVE",
            "TaskAccount",
            "account_for_tasks",
            "average",
            "find_lives",
            "find_resumes",
        ),
        "layout": (
            "assign_contiguous_shards",
            "find_shard_holders",
            "find_successors",
        ),
        "drain_notices": ("DrainNode", "KeepNode", "plan_drains"),
        "holders": ("holders",),
        "taking_over": ("taking_over",),
        "membership": (
            "AgentFacts",
            "AgentLoad",
            "Member",
            "Membership",
            "describe_state",
            "membership",
        ),
        "losses": ("Loss", "find_losses"),
        "moves": (
            "Ownership",
            "find_ownership",
            "plan_moves",
        ),
        "placement": (
            "choose_thread_count",
            "choose_worker_count",
            "place_tasks",
            "stand_in_for_cache",
        ),
        "quiet": (
            "QuietWatch",
            "find_left_alone",
        ),
        "recovery_progress": (
            "find_disconnected",
            "find_furthest",
            "find_ready_to_join",
            "find_waiting_for_ended",
            "has_recovered",
        ),
        "stall": ("StallWatch",),
        "copy_orders": (
            "CopyOrder",
            "CopyOrders",
            "find_copy_order",
            "find_departed",
        ),
        "stragglers": (
            "Straggler",
            "find_stragglers",
        ),
    },
)

__all__ = [
    "ENDED",
    "EVALUATOR_GRACE",
    "PRODUCTIVE",
    "SILENT_SECONDS",
    "VANISHED_SECONDS",
    "Action",
    "AgentFacts",
    "AgentLoad",
    "AgentView",
    "Claim",
    "ControllerLostEvent",
    "CopyOrder",
    "CopyOrders",
    "CopyVersion",
    "DataMovedEvent",
    "DrainNode",
    "EpochStep",
    "Event",
    "Failure",
    "Finish",
    "HostSigns",
    "HostWatch",
    "JobState",
    "KeepNode",
    "Launch",
    "LaunchFailedEvent",
    "LaunchedEvent",
    "LeaveEvent",
    "LeftAloneEvent",
    "Log",
    "Loss",
    "Member",
    "Membership",
    "MoveEvent",
    "Ownership",
    "PeersLostEvent",
    "Publish",
    "QuietWatch",
    "ReadyEvent",
    "RecoveredEvent",
    "RepairPlan",
    "Reply",
    "ResumedEvent",
    "ScaleRequestedEvent",
    "Signal",
    "StallWatch",
    "StalledEvent",
    "StopRequestedEvent",
    "Straggler",
    "SubmittedEvent",
    "TakenOverEvent",
    "TaskAccount",
    "TaskExitedEvent",
    "TaskState",
    "TickEvent",
    "account_for_tasks",
    "advance",
    "assign_contiguous_shards",
    "average",
    "build_task_environment",
    "choose_copy_holders",
    "choose_holders",
    "choose_newest_copy",
    "choose_next_epoch",
    "choose_thread_count",
    "choose_worker_count",
    "count_name_copies",
    "decode_job",
    "describe_state",
    "encode_action",
    "encode_event",
    "encode_job",
    "find_copy_order",
    "find_departed",
    "find_disconnected",
    "find_furthest",
    "find_left_alone",
    "find_lives",
    "find_losses",
    "find_missing_majority",
    "find_obstacle_to_taking_over",
    "find_ownership",
    "find_ready_to_join",
    "find_resumes",
    "find_shard_holders",
    "find_stragglers",
    "find_successors",
    "find_waiting_for_ended",
    "has_recovered",
    "holders",
    "may_obey",
    "may_write",
    "membership",
    "new_job",
    "place_tasks",
    "plan_drains",
    "plan_moves",
    "plan_repair",
    "rank_nodes",
    "stand_in_for_cache",
    "taking_over",
]
