"""The decisions about jobs, all pure: (state, event, now) to a new state and actions.

No clock, thread, socket, process or file. Begin reading with `job.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.decide.environment import task_environment
    from insitu.cluster.decide.job import advance, new_job
    from insitu.cluster.decide.job_state import (
        ENDED,
        Action,
        ControllerLost,
        Event,
        Failure,
        Finish,
        JobState,
        Launch,
        Launched,
        LaunchFailed,
        PeersParted,
        Publish,
        Ready,
        Recovered,
        Resumed,
        Say,
        ScaleRequested,
        Signal,
        Stalled,
        Steps,
        StopRequested,
        Submitted,
        TakenOver,
        TaskExited,
        TaskState,
        Tick,
        plain,
    )
    from insitu.cluster.decide.layout import contiguous, holders_of_shards
    from insitu.cluster.decide.placement import default_threads, default_workers, place
    from insitu.cluster.decide.recovery_progress import furthest, has_recovered, parted, ready_to_join
    from insitu.cluster.decide.stall import StallWatch
    from insitu.cluster.decide.stragglers import Straggler, find_stragglers

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "environment": ("task_environment",),
        "job": ("advance", "new_job"),
        "job_state": (
            "Action",
            "ControllerLost",
            "ENDED",
            "Event",
            "Failure",
            "Finish",
            "JobState",
            "Launch",
            "LaunchFailed",
            "Launched",
            "PeersParted",
            "Publish",
            "Ready",
            "Recovered",
            "Resumed",
            "Say",
            "ScaleRequested",
            "Signal",
            "Stalled",
            "Steps",
            "StopRequested",
            "Submitted",
            "TakenOver",
            "TaskExited",
            "TaskState",
            "Tick",
            "plain",
        ),
        "layout": ("contiguous", "holders_of_shards"),
        "placement": ("default_threads", "default_workers", "place"),
        "recovery_progress": ("furthest", "has_recovered", "parted", "ready_to_join"),
        "stall": ("StallWatch",),
        "stragglers": ("Straggler", "find_stragglers"),
    },
)

__all__ = [
    "ENDED",
    "Action",
    "ControllerLost",
    "Event",
    "Failure",
    "Finish",
    "JobState",
    "Launch",
    "LaunchFailed",
    "Launched",
    "PeersParted",
    "Publish",
    "Ready",
    "Recovered",
    "Resumed",
    "Say",
    "ScaleRequested",
    "Signal",
    "StallWatch",
    "Stalled",
    "Steps",
    "StopRequested",
    "Straggler",
    "Submitted",
    "TakenOver",
    "TaskExited",
    "TaskState",
    "Tick",
    "advance",
    "contiguous",
    "default_threads",
    "default_workers",
    "find_stragglers",
    "furthest",
    "has_recovered",
    "holders_of_shards",
    "new_job",
    "parted",
    "place",
    "plain",
    "ready_to_join",
    "task_environment",
]
