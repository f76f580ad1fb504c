"""The seam between the controller and what runs tasks on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from insitu.spec import TaskId, TaskSpec

SignalName = Literal["term", "kill", "dump"]


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a task printed, in the order in which it printed them."""

    task: TaskId
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended, and so has all that it started. `code` is negative for a signal.

    Comes after all of the task's output.
    """

    task: TaskId
    code: int


@dataclass(frozen=True, slots=True)
class Command:
    """What one task runs: a whole argument list, a whole environment, and a folder to run in."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: Path


class Engine(Protocol):
    """Starts processes beside their data and watches them. Used from one thread."""

    def reserve(self, tasks: Sequence[TaskSpec]) -> dict[TaskId, str]:
        """A distinct `host:port` for each task on its node, held until the task is launched."""

    def launch(self, task: TaskSpec, command: Command) -> None:
        """Starts the task. Raises ClusterError where that can't be done."""

    def signal(self, task: TaskId, name: SignalName) -> None:
        """Sends to the task (`dump`) or to it and all it has started (`term`, `kill`); no-op once ended."""

    def wait(self, timeout: float | None) -> list[Output | Ended]:
        """What happened, as soon as anything has, or nothing after `timeout` seconds (None: no limit)."""

    def close(self) -> None:
        """Kills what still runs and lets go of everything."""
