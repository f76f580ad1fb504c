"""Keeps the tasks of a group in step, and lets another take the place of one that is lost.

All that tasks do together is cut into *units*: a training step, a test step, a prediction, a broadcast of
the first weights. A unit computes, moves buffers and ends with one `all_gather`, whose result every task has
before it changes anything of its model. So when a peer is lost each survivor stands in one of two places:

- in the newest unit, whose results nobody has: it is done again from its beginning, by all;
- in the last gather of the unit before: then others have its result, and tell it.

Nothing has to be taken back, and no survivor needs another's state. A replacement runs the script from its
start, is given the state of a survivor in the newest unit, and passes over everything until it comes to that
unit, which it then does with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ExchangeError, PeerLost, StaleGeneration, TrainingError
from insitu.exchange import Group
from insitu.train.collectives import all_gather_json, broadcast_value
from insitu.train.elastic.divergence import Fingerprint, check_equal

Key = tuple[Any, ...]
"""What tells a unit apart, the same in each task and each life of a script: texts and numbers."""
Work = Callable[[Group], NDArray[Any]]
"""All of a unit but its last gather. Returns what this task adds to that. May be called again."""

SETUP = "setup"
"""A key's kind, its second member, of units before which replicas may differ."""
LOOP = "loop"
"""A key's kind for steps of a script's own loop, which no replacement can enter."""


class Again(Exception):
    """Internal: the unit was interrupted and is to be done again, with the shards that this task then has."""


class Superseded(Exception):
    """Internal: this generation of the group has ended, since membership changed."""


class Places(Protocol):
    """Where this task's place in the group comes from."""

    def join(self) -> Group:
        """Meets the others for the first time in this life."""

    def rejoin(self, group: Group, lost: Exception) -> None:
        """Waits for the next generation and forms `group` anew. Raises TrainingError when none comes."""

    def heed(self, group: Group) -> None:
        """Raises Superseded where there is a newer generation than the group's."""


class Carrier(Protocol):
    """What a replacement needs of a survivor."""

    def give(self) -> Any:
        """All of it, as a plain value. Its arrays are read at once."""

    def receive(self, told: Any) -> None:
        """What a survivor gave, before the script has got to where the others are."""

    def arrive(self, key: Key) -> None:
        """This task has come to the unit that the others are in: it is to be as they are."""

    def fingerprint(self) -> Fingerprint:
        """What is the same in all tasks, wherever they do the same unit."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The unit in which the others are: its number and key."""

    unit: int
    key: Key


class Lockstep:
    """One task's part in the units of a group. Joins when it is first needed."""

    def __init__(self, places: Places, carrier: Carrier) -> None:
        self._places = places
        self._carrier = carrier
        self._group: Group | None = None
        self._units = 0
        self._last: NDArray[Any] | None = None
        self._unchecked = False
        self.key: Key = (0, LOOP)
        """The key of the step that comes next, for steps that ask for it; set by whoever calls them."""
        self.goal: Goal | None = None
        """Where the others are, while this task is on its way there; else None."""
        self.recoveries = 0

    @property
    def group(self) -> Group:
        """The group; joined when it is first asked for."""
        if self._group is None:
            self._group = self._places.join()
            try:
                self._meet(None, False)
            except (PeerLost, StaleGeneration, Superseded) as lost:
                self._recover(None, False, lost)
        return self._group

    @property
    def arriving(self) -> bool:
        """Whether this task takes another's place and hasn't come to where the others are."""
        return self.group is not None and self.goal is not None

    def perform(self, key: Key, work: Work) -> NDArray[Any]:
        """Does a unit with all others. Returns the rows of all shards.

        Raises Again where it is to be done again; TrainingError where the script doesn't lead to where the
        others are, or they don't come back; Diverged.
        """
        group = self.group
        if self.goal is not None:
            self._arrive(key)
        committed = False
        try:
            self._places.heed(group)
            if self._unchecked and key[1] != SETUP:
                check_equal(group, self._carrier.fingerprint(), f"before {_words(key)}")
            self._unchecked = False
            row = work(group)
            committed = True
            result = group.all_gather(row)
        except (PeerLost, StaleGeneration, Superseded) as lost:
            told = self._recover(key, committed, lost)
            if told is None:
                raise Again from lost
            result = told
        self._units += 1
        self._last = result
        return result

    def check_next(self) -> None:
        """Before the next unit it's checked that replicas are equal. All tasks ask for it before the same."""
        self._unchecked = True

    def insist(self, key: Key, work: Work) -> NDArray[Any]:
        """Does a unit that doesn't depend on which shards this task has, until it is done. An arriving task
        passes over it, with an empty result, unless it is where the others are."""
        while True:
            if self.arriving and self.goal is not None and self.goal.key != key:
                return np.empty(0)
            try:
                return self.perform(key, work)
            except Again:
                continue

    def _arrive(self, key: Key) -> None:
        goal = self.goal
        if goal is None:
            return
        if goal.key != key:
            raise TrainingError(
                f"The others are at {_words(goal.key)}, and this script, run from its start, came to "
                f"{_words(key)} instead. A script must do the same in each task and in each life of it."
            )
        self._carrier.arrive(key)
        self._units, self.goal = goal.unit, None

    # After a loss

    def _recover(self, key: Key | None, committed: bool, lost: Exception) -> NDArray[Any] | None:
        """Goes on in the next generation. Returns the result of the unit where others have it already."""
        group = self._group
        if group is None:
            raise lost
        self.recoveries += 1
        while True:
            # Outside: what it raises is final.
            self._places.rejoin(group, lost)
            try:
                return self._meet(key, committed)
            except (PeerLost, StaleGeneration, Superseded) as again:
                lost = again

    def _meet(self, key: Key | None, committed: bool) -> NDArray[Any] | None:
        """All say where they are, behind and new ones are told what they need."""
        group = self._group
        if group is None:
            raise ExchangeError("The group has not been joined")
        self._unchecked = False
        unit = -1 if key is None else self._units
        notes = all_gather_json(group, {"unit": unit, "key": list(key or ())})
        units = [int(note["unit"]) for note in notes]
        newest = max(units)
        if newest < 0:
            return None
        source = units.index(newest)
        if any(0 <= unit < newest - 1 for unit in units):
            raise TrainingError(f"Tasks are more than one step apart: {units}. Start the job again.")
        result = None
        if newest - 1 in units:
            result = broadcast_value(group, source, self._last, keep=unit == newest - 1)
        if -1 in units:
            self._hand_over(group, source, unit, Goal(newest, _tuples(notes[source]["key"])))
        self._unchecked = True
        if unit != newest - 1 or unit < 0:
            return None
        if not committed:
            raise TrainingError("This task was left behind in the middle of a step. Start the job again.")
        return result

    def _hand_over(self, group: Group, source: int, unit: int, goal: Goal) -> None:
        value = self._carrier.give() if group.rank == source else None
        told = broadcast_value(group, source, value, keep=unit < 0)
        if unit < 0:
            self._carrier.receive(told)
            self.goal = goal


def _tuples(key: Any) -> Key:
    return tuple(key)


def _words(key: Key) -> str:
    return " ".join(str(part) for part in key)
