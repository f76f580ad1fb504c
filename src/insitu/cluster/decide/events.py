"""Events that can happen to a job, and actions that can follow. Frozen values, no logic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from insitu.base.spec import NodeId, TaskId
from insitu.cluster.decide.job_state import EpochStep, Failure, JobState


@dataclass(frozen=True, slots=True)
class SubmittedEvent:
    """The job may begin, or resume."""

    #: For a job that resumes: nodes that can't be reached now.
    lost: tuple[NodeId, ...] = ()
    #: For a job that resumes: whether its folder has a checkpoint.
    has_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class TaskExitedEvent:
    """An incarnation of a task ended."""

    #: The task that ended.
    task: TaskId
    #: Its exit code; negative for a signal.
    code: int
    #: The task's record of its own end, None if it wrote none.
    failure: Failure | None = None
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None
    #: Those of the tasks still alive that train by their progress records.
    reporting: tuple[TaskId, ...] = ()
    #: Those of the tasks still alive that can continue without a peer.
    elastic: tuple[TaskId, ...] = ()
    #: Nodes whose store is gone.
    lost: tuple[NodeId, ...] = ()
    #: Which incarnation ended; None stands for the present one.
    incarnation: int | None = None
    #: Those of the tasks still alive that report that they wait for others, as after a loss.
    recovering: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchFailedEvent:
    """Tasks could not be started."""

    #: The tasks that don't run.
    tasks: tuple[TaskId, ...]
    #: The engine's reason.
    message: str
    #: Those of the tasks alive that can continue without a peer.
    elastic: tuple[TaskId, ...] = ()
    #: Nodes that have lost their store, or can't be reached.
    lost: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchedEvent:
    """Tasks were started."""

    #: (task, process id) of each.
    processes: tuple[tuple[TaskId, int], ...]
    #: The incarnation of each, in the same order.
    incarnations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadyEvent:
    """Tasks that the roster doesn't name yet are ready to join."""

    #: The tasks that wait to join.
    tasks: tuple[TaskId, ...]
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None


@dataclass(frozen=True, slots=True)
class PeersLostEvent:
    """Members report that they wait for others, yet none has died: connections between them broke, or the
    scripts of those others have ended well."""

    #: The members that report it.
    tasks: tuple[TaskId, ...]
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None
    #: Those of the tasks alive that can continue without a peer.
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveredEvent:
    """Every member has completed a step in the newest generation, or has ended its training in it."""

    #: That generation.
    generation: int


@dataclass(frozen=True, slots=True)
class ScaleRequestedEvent:
    """A user asked for another number of workers."""

    #: Workers asked for.
    workers: int
    #: Identifies the request, so that its sender gets the reply; "" if nobody awaits one.
    token: str = ""
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None
    #: Those of the tasks alive that can continue without a peer.
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class DataMovedEvent:
    """Partitions have other owners, or nodes leave."""

    #: For each shard the nodes that hold it; empty: as before.
    holders: tuple[tuple[NodeId, ...], ...]
    #: Nodes that are to leave: nothing is launched there.
    leaving: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveEvent:
    """Nodes are ready to run tasks that run elsewhere."""

    #: (task, the node to which it moves).
    moves: tuple[tuple[TaskId, NodeId], ...]
    #: Why, for the user.
    reason: str
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None
    #: Those of the tasks alive that can continue without a peer.
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaveEvent:
    """A node leaves soon, and tasks on it can't move while the others continue."""

    #: The node.
    node: NodeId
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None


@dataclass(frozen=True, slots=True)
class StalledEvent:
    """Nothing has moved for the stall timeout."""

    #: Names tasks, steps and activities, for the user.
    text: str
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None
    #: The tasks that all others wait for; empty if that is unknown.
    culprits: tuple[TaskId, ...] = ()
    #: Those of the tasks alive that can continue without a peer.
    elastic: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class LeftAloneEvent:
    """Worker 0 has ended well, and the workers that are left do nothing; see `quiet`."""

    #: The workers that are left.
    tasks: tuple[TaskId, ...]
    #: Seconds for which they have neither printed nor used the processor.
    seconds: float
    #: The furthest (epoch, step) that any task of the job has reported.
    progress: EpochStep | None = None


@dataclass(frozen=True, slots=True)
class StopRequestedEvent:
    """A user asked for the job to be stopped. Asked again, the tasks are killed at once."""

    #: Identifies the request, so that its sender gets the reply; "" if nobody awaits one.
    token: str = ""


@dataclass(frozen=True, slots=True)
class ControllerLostEvent:
    """Nothing of the job runs any more, and no controller is left to act."""

    #: Why, for the user; "" if the job's processes were ended from outside.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TakenOverEvent:
    """The controller died and a new one continues in its place; tasks have not been touched."""


@dataclass(frozen=True, slots=True)
class ResumedEvent:
    """A job that has ended without having finished will resume, once a controller is there."""


@dataclass(frozen=True, slots=True)
class TickEvent:
    """A time in `JobState.due` has come."""


Event = (
    SubmittedEvent
    | TaskExitedEvent
    | LaunchFailedEvent
    | LaunchedEvent
    | ReadyEvent
    | PeersLostEvent
    | RecoveredEvent
    | ScaleRequestedEvent
    | DataMovedEvent
    | MoveEvent
    | LeaveEvent
    | StalledEvent
    | LeftAloneEvent
    | StopRequestedEvent
    | ControllerLostEvent
    | TakenOverEvent
    | ResumedEvent
    | TickEvent
)


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the roster of a generation, with fresh addresses for the tasks that have none yet."""

    #: The generation to write.
    generation: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the present incarnation of tasks; each task's state holds its number."""

    #: The tasks to start.
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to a task and to whatever it has started."""

    #: The task to signal.
    task: TaskId
    #: `term` and `kill` are SIGTERM and SIGKILL; `dump` makes it write its stacks.
    name: Literal["term", "kill", "dump"]


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line of insitu's own into the job's output."""

    #: The line.
    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to the request of a user."""

    #: Identifies the request.
    token: str
    #: The action that follows, or the reason why none does.
    text: str
    #: True if the request is refused.
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over."""

    #: The job's exit code.
    exit_code: int


Action = Publish | Launch | Signal | Log | Reply | Finish
Result = tuple[JobState, list[Action]]
