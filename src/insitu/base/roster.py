"""The roster: the members of a job's group, in one file that the controller replaces.

The controller writes generation 1 at launch, and a higher one whenever membership changes: a task was
replaced, its shards were adopted, the job was scaled, or all tasks were started again. The tasks read it:

- A task that loses a peer reports the place `recovering`. It waits for a roster of a higher generation than
  its group's, then rejoins with the addresses and shards in that roster.
- A task checks for a newer roster while it waits, rejoins and trains (`RosterWatch` makes this cheap). If
  there is one, the task stops what it does and rejoins by the newest one.
- A task that starts looks for its (task, incarnation) in the newest roster. If it isn't there, the task
  reports the place `joining` and waits for a roster that names it. The controller takes that as readiness.
- A task that waits for one whose script has ended well gets a roster without that one, which it names under
  `ended`.
- A task that a newer roster doesn't name has been released: it ends its training and exits with 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import replace_file
from insitu.base.errors import InputError
from insitu.base.spec import TaskId

RECOVERING = "recovering"
"""The place (see `progress.py`) that a task reports when it has lost a peer and waits for a roster."""
CONNECTING = "join"
"""The place that a task reports while it connects to the others of its roster for the first time."""
JOINING = "joining"
"""The place that a task reports when it is ready to join and waits for a roster that names it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a task, as the group sees it."""

    #: The task that the process is of.
    task: TaskId
    #: How often the task has been started, from 1.
    incarnation: int
    #: `host:port`.
    address: str
    #: Shards that it trains on, ascending.
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of a job's group. Written by the controller, read by the tasks."""

    #: Counted from 1; each new roster of a job has a higher one.
    generation: int
    #: The workers that train together. A member's rank is its index here. Together they run each shard once.
    members: tuple[Member, ...]
    #: Chief, ps and evaluator, in that order.
    others: tuple[Member, ...] = ()
    #: Workers whose scripts have ended well before the members' did. The members do without them.
    ended: tuple[TaskId, ...] = ()
    #: Whether training is over: no task trains any more, and no checkpoint is written.
    training_over: bool = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The members' addresses, by rank."""
        return tuple(member.address for member in self.members)

    def rank(self, task: TaskId, incarnation: int | None = None) -> int | None:
        """Return the rank of `task`, or None if it is no member (or only another `incarnation` of it is)."""
        for rank, member in enumerate(self.members):
            if member.task == task and incarnation in (None, member.incarnation):
                return rank
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "members": [_to_json(m) for m in self.members],
            "others": [_to_json(m) for m in self.others],
            "ended": [str(task) for task in self.ended],
            "training_over": self.training_over,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Roster:
        return cls(
            int(data["generation"]),
            tuple(map(_from_json, data["members"])),
            tuple(map(_from_json, data["others"])),
            tuple(map(TaskId.parse, data.get("ended", ()))),
            bool(data.get("training_over", False)),
        )


def _to_json(member: Member) -> dict[str, Any]:
    return {
        "task": str(member.task),
        "attempt": member.incarnation,
        "address": member.address,
        "shards": list(member.shards),
    }


def _from_json(data: Mapping[str, Any]) -> Member:
    return Member(
        TaskId.parse(data["task"]), int(data["attempt"]), str(data["address"]), tuple(data["shards"])
    )


def write_roster(path: Path, roster: Roster) -> None:
    """Replace the roster at `path`, so that it survives a power cut. Raises OSError."""
    replace_file(path, json.dumps(roster.to_json()).encode(), sync=True)


def read_roster(path: Path) -> Roster | None:
    """Return the newest roster, or None if there is none yet.

    A damaged one counts as none: the controller writes another with the next change of membership.
    """
    try:
        return Roster.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError):
        return None


class RosterWatch:
    """Reads a roster again when it has changed. The check costs one system call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._roster: Roster | None = None

    def newest(self) -> Roster | None:
        """Return the newest roster, the same object while it stays so; None if there is none yet."""
        try:
            found = os.stat(self._path)
        except OSError:
            return self._roster
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        if mark != self._seen:
            # One that is written once more is no other one: who joins by it would join again, for ever.
            if (newest := read_roster(self._path)) != self._roster:
                self._roster = newest or self._roster
            self._seen = mark
        return self._roster
