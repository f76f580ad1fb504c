"""The seam between a job's supervisor and what runs its tasks on nodes.

An engine is made of three parts: `ProcessControl` starts and ends processes, `TaskSetup` prepares what they
find, `TaskObserver` says how they are. All of them are used from one thread. The user of an engine learns
of the tasks in no other way: they may run on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from insitu.base.progress import Progress
from insitu.base.roster import Roster
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.decide import Failure

SignalName = Literal["term", "kill", "dump", "suspend", "continue"]


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a task printed, in the order in which it printed them."""

    #: The task that printed them.
    task: TaskId
    #: The bytes.
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended, and so has all that it started. `code` is negative for a signal.

    Comes after all of the task's output.
    """

    #: The task that has ended.
    task: TaskId
    #: Its exit code; negative for the number of the signal that ended it.
    code: int


@dataclass(frozen=True, slots=True)
class Command:
    """What one task runs: a whole argument list and a whole environment. The engine knows the folder."""

    #: The argument list, with the program first.
    arguments: tuple[str, ...]
    #: All variables of the environment, by name.
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The process of a running task, as its node sees it."""

    #: Suspended by SIGSTOP or a debugger.
    suspended: bool
    #: Bytes of physical memory that it has.
    resident_bytes: int
    #: Seconds of processor time that it has used, with the processes of its session.
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node, as seen on it."""

    #: Bytes of memory that processes may still get.
    available_bytes: int
    #: False once the folder that holds the node's partitions is gone.
    has_store: bool


class ProcessControl(Protocol):
    """Starts processes beside their data and ends them."""

    def launch(self, task: TaskSpec, command: Command) -> int:
        """Start the task. Returns its process id on its node. Raises ClusterError."""

    def keep_standby(self, count: int, command: Command) -> None:
        """Keep `count` warmed processes from now on that can become tasks of `command`."""

    def signal(self, task: TaskId, name: SignalName) -> None:
        """Send to the task (`dump`, `suspend`, `continue`) or to it and all it has started (`term`, `kill`);
        no-op once ended."""

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        """Return what happened, as soon as anything has; nothing after `timeout` seconds, if given."""

    def close(self) -> None:
        """Kill what still runs and let go of everything."""


class TaskSetup(Protocol):
    """Prepares what tasks find when they begin."""

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        """Return a distinct `host:port` for each task on its node, bound until the job ends.

        The task gets the bound socket when it is launched (see `base/net/ports.py`). One that runs keeps its
        address. Addresses of an earlier call that weren't used are let go of. Raises ClusterError.
        """

    def publish_roster(self, roster: Roster) -> None:
        """Replace the roster that tasks see, on all nodes. Raises ClusterError."""

    def clear_records(self, tasks: Sequence[TaskId]) -> None:
        """Remove what earlier incarnations of these tasks wrote about themselves. Raises ClusterError."""

    def prepare(self, tasks: Sequence[TaskSpec]) -> bool:
        """Begin to have all on their nodes that these tasks will need there, which run elsewhere now. Returns
        whether it is there; called again until it is. Raises ClusterError."""


class TaskObserver(Protocol):
    """Says how tasks and nodes are. What can't be found out is left out; nothing raises."""

    def read_progress(self, tasks: Sequence[TaskId]) -> dict[TaskId, Progress]:
        """Return the last progress record of each task that has written one."""

    def read_failure(self, task: TaskId) -> Failure | None:
        """Return what the task wrote about the exception that ended it."""

    def process_states(self, tasks: Sequence[TaskId]) -> dict[TaskId, ProcessState]:
        """Return the state of each of these tasks that runs."""

    def node_states(self, nodes: Sequence[NodeId]) -> dict[NodeId, NodeState]:
        """Return the state of each of these nodes."""


class Engine(ProcessControl, TaskSetup, TaskObserver, Protocol):
    """What a supervisor needs of an engine."""
