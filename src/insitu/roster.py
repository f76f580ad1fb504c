"""Keeps the roster: the members of a job's group, in one file that the controller replaces.

The controller writes generation 1 at launch and generation + 1 whenever membership changes: a task was
replaced, its shards were adopted, the job was scaled, or all tasks were started again. A task

- that loses a peer reports the place `recovering` and waits for a roster of a higher generation than its
group's, then rejoins with that roster's addresses and with the shards that the roster gives to it;
- that sees a newer roster while it waits, rejoins or trains (a look at each step is cheap: `RosterWatch`)
  abandons what it does and rejoins by the newest one;
- that starts looks for itself, (task, incarnation), in the newest roster. If that doesn't name it yet it
  reports the place `joining` and waits for one that does: the controller takes this for "ready" and adds it;
- that a newer roster no longer names has been released: it ends its training and exits with 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.spec import TaskId

RECOVERING = "recovering"
"""The place (see `insitu.progress`) of a task that has lost a peer and waits for a newer roster."""
JOINING = "joining"
"""The place of a task that is ready to join and waits for a roster that names it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of one task."""

    #: The task.
    task: TaskId
    #: Number of its incarnation, from 1.
    incarnation: int
    #: Where it listens, as `host:port`.
    address: str
    #: The shards that it runs, ascending.
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Roster:
    """The tasks of one generation. Together the members run each shard once."""

    #: Number of this roster, from 1.
    generation: int
    #: The workers that train together: the rank of each is its position here.
    members: tuple[Member, ...]
    #: Chief, ps and evaluator, in that order.
    others: tuple[Member, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the members, by rank."""
        return tuple(member.address for member in self.members)

    def rank(self, task: TaskId, incarnation: int | None = None) -> int | None:
        """Return the rank of `task`, or None where it is no member (or only another `incarnation` of it
        is)."""
        for rank, member in enumerate(self.members):
            if member.task == task and incarnation in (None, member.incarnation):
                return rank
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "members": [_to_json(m) for m in self.members],
            "others": [_to_json(m) for m in self.others],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Roster:
        return cls(
            int(data["generation"]),
            tuple(map(_from_json, data["members"])),
            tuple(map(_from_json, data["others"])),
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
    """Publishes `roster` at `path` by rename. Raises OSError."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(roster.to_json()))
    staged.replace(path)


def read_roster(path: Path) -> Roster | None:
    """Return the newest roster, or None where there is none yet."""
    try:
        return Roster.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


class RosterWatch:
    """Reads newer rosters. Checking an unchanged one is one system call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._roster: Roster | None = None

    def newest(self) -> Roster | None:
        """Return the newest roster, the very same object while it stays the newest;

        None where there is none yet.
        """
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return self._roster
        mark = (found.st_ino, found.st_mtime_ns, found.st_size)
        if mark != self._seen:
            self._roster = read_roster(self._path)
            self._seen = mark
        return self._roster
