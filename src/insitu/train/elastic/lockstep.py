"""Keeps the tasks of a group in step, and lets another take the place of one that is lost.

All that tasks do together is cut into *units*: a training step, a test step, a prediction, a broadcast of
the first weights. A unit computes, moves buffers and ends with one `all_gather`, whose result every task has
before it changes anything of its model. So when a peer is lost each survivor stands in one of two places:

- in the newest unit, whose results nobody has: it is done again from its beginning, by all;
- in the last gather of the unit before: then others have its result, and send it.

Nothing has to be rolled back, and no survivor needs another's state. A replacement runs the script from its
start, is given the state of a survivor in the newest unit, as it was behind the unit before, and skips
everything up to there. Then it runs what lies between the two units, as callbacks, and does the newest one
with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from insitu.errors import ExchangeError, PeerLost, StaleGeneration, TrainingError
from insitu.exchange import Group
from insitu.train.collectives import all_gather_json, broadcast_value
from insitu.train.elastic.call_check import find_place, refuse_without
from insitu.train.elastic.divergence import Fingerprint, check_equal
from insitu.train.elastic.position import LOOP, TRAIN, LoopPosition
from insitu.train.elastic.sums_probe import check_same_sums

Work = Callable[[Group], NDArray[Any]]
"""All of a unit but its last gather. Returns what this task adds to that. May be called again."""


class RetryStep(Exception):
    """Internal: the unit was interrupted and is to be done again, with the shards that this task then has."""


class GenerationChanged(Exception):
    """Internal: this generation of the group has ended, since membership changed."""


class ElasticRendezvous(Protocol):
    """Forms the group, at first and after each change of membership."""

    def join(self) -> Group:
        """Form the group with the others for the first time in this process."""

    def rejoin(self, group: Group, lost: Exception) -> None:
        """Wait for the next generation and form `group` again. Raises TrainingError when none comes."""

    def raise_if_superseded(self, group: Group) -> None:
        """Raise GenerationChanged where there is a newer generation than the group's."""

    @property
    def ended(self) -> Sequence[str]:
        """Names of tasks that the group does without, since their scripts have ended well."""

    def describe_sums(self) -> Mapping[str, str]:
        """Return what this task says of its backend's sums to the others of the group; maybe nothing."""


class StateProvider(Protocol):
    """Carries a survivor's state over to a replacement."""

    def state_dict(self) -> Any:
        """Return all that a replacement needs, as a plain value. Its arrays are read at once."""

    def stage(self, state: Any) -> None:
        """Keep a survivor's `state` until the script has got to where the others are."""

    def resume(self, position: LoopPosition) -> None:
        """Load the staged state: this task has come to the unit that the others are in."""

    def begin_unit(self, group: Group, position: LoopPosition) -> None:
        """Prepare for a unit, which may be interrupted and begun again: what a replacement enters by is what
        is there now. Collective."""

    def end_unit(self, position: LoopPosition) -> None:
        """Hear that a unit was done."""

    def fingerprint(self) -> Fingerprint:
        """Return hashes of what must be equal in all tasks before they do the same unit."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The unit in which the others are, and in which a replacement joins them."""

    #: Number of the unit since the group first formed.
    unit: int
    #: Its position.
    position: LoopPosition


class Units(Protocol):
    """The units of a script's calls, as far as a model's trainer runs them itself."""

    def find_resume_point(self) -> ResumePoint | None:
        """Return where the others are if this task takes another's place and hasn't come there yet."""

    def check_before_next_unit(self) -> None:
        """Have replicas compared before the next unit. All tasks call it before the same one."""

    def run_unit_until_done(self, position: LoopPosition, work: Work) -> NDArray[Any]:
        """Do a unit that doesn't depend on which shards this task has. Return the rows of all shards, or
        an empty array where there is nothing for this task to do together with others."""


class Lockstep:
    """Does units of work with the other tasks of a group, and recovers from the loss of any of them."""

    def __init__(self, rendezvous: ElasticRendezvous, provider: StateProvider) -> None:
        self._rendezvous = rendezvous
        self._provider = provider
        #: The group of all tasks; None until it is first needed.
        self._group: Group | None = None
        #: Number of the unit that comes next, counted by `run_unit`; the newest unit has the highest.
        self._unit = 0
        #: Number of the last unit that was interrupted. Written by `run_unit`.
        self._interrupted = -1
        #: Rows of the unit before, for a task that lost them in its last gather.
        self._last_result: NDArray[Any] | None = None
        #: Whether replicas are compared before the next unit.
        self._check_pending = False
        #: Where the others are, while this task is on its way there. Written when their state is received,
        #: cleared in `_resume`.
        self._resume_point: ResumePoint | None = None

    @property
    def group(self) -> Group:
        """The group; joined when it is first asked for."""
        if self._group is None:
            self._group = self._rendezvous.join()
            try:
                self._synchronize(None, False)
            except (PeerLost, StaleGeneration, GenerationChanged) as lost:
                self._recover(None, False, lost)
        return self._group

    def find_resume_point(self) -> ResumePoint | None:
        """Join the group; return where the others are if this task takes another's place and hasn't come
        there yet, else None."""
        return self._resume_point if self.group is not None else None

    def run_unit(self, position: LoopPosition, work: Work) -> NDArray[Any]:
        """Do the unit at `position` with all others. Returns the rows of all shards.

        Raises:
            RetryStep: where it is to be done again.
            CollectiveMismatch: where other tasks have ended, and this is a training step.
            TrainingError: where the script doesn't lead to where the others are, or they don't come back.
            Diverged: where replicas aren't equal.
        """
        group = self.group
        if self._resume_point is not None:
            self._resume(position, self._resume_point)
        self._check_nobody_ended(position)
        committed = False
        try:
            self._rendezvous.raise_if_superseded(group)
            if not position.is_setup and self._check_pending:
                check_equal(group, self._provider.fingerprint(), f"before {position}")
                self._check_pending = False
            self._provider.begin_unit(group, position)
            row = work(group)
            committed = True
            result = group.all_gather(row)
        except (PeerLost, StaleGeneration, GenerationChanged) as lost:
            self._interrupted = self._unit
            recovered = self._recover(position, committed, lost)
            if recovered is None:
                self._check_can_retry(position)
                raise RetryStep from lost
            result = recovered
        self._unit += 1
        self._last_result = result
        self._provider.end_unit(position)
        return result

    def check_before_next_unit(self) -> None:
        """Have replicas compared before the next unit. All tasks call it before the same one."""
        self._check_pending = True

    def run_unit_until_done(self, position: LoopPosition, work: Work) -> NDArray[Any]:
        """Do a unit that doesn't depend on which shards this task has, again after each loss.

        A replacement on its way to the others skips it, with an empty result, unless they are in it.
        """
        while True:
            point = self.find_resume_point()
            if point is not None and point.position != position:
                return np.empty(0)
            try:
                return self.run_unit(position, work)
            except RetryStep:
                continue

    def _check_nobody_ended(self, position: LoopPosition) -> None:
        """Raise CollectiveMismatch for a training step that lacks a task, whose script has ended.

        The unit that was interrupted by its end may be done again: it may be the last one, whose result that
        task has.
        """
        ended = self._rendezvous.ended
        if ended and position.kind in (TRAIN, LOOP) and self._unit != self._interrupted:
            at = f"epoch {position.epoch + 1} step {position.step + 1}"
            raise refuse_without(ended, None, f"training goes on with {at} at {find_place()}")

    def _check_can_retry(self, position: LoopPosition) -> None:
        """Raise CollectiveMismatch for an interrupted step of a script's own loop: only the script has its
        rows."""
        if position.kind == LOOP:
            raise refuse_without(
                self._rendezvous.ended or ("another task",),
                None,
                "the others go on with a step of their loop",
            )

    def _resume(self, position: LoopPosition, point: ResumePoint) -> None:
        if point.position != position:
            raise TrainingError(
                f"The other tasks are at {point.position}, and this script, run from its start, came to "
                f"{position} instead. Make the script do the same in each task and each time that it runs."
            )
        self._provider.resume(position)
        self._unit, self._resume_point = point.unit, None

    # After a loss

    def _recover(
        self, position: LoopPosition | None, committed: bool, lost: Exception
    ) -> NDArray[Any] | None:
        """Form the next generation. Returns the result of the unit where others have it already."""
        group = self._group
        if group is None:
            raise lost
        while True:
            # Outside of `try`: what it raises is final.
            self._rendezvous.rejoin(group, lost)
            try:
                return self._synchronize(position, committed)
            except (PeerLost, StaleGeneration, GenerationChanged) as again:
                lost = again

    def _synchronize(self, position: LoopPosition | None, committed: bool) -> NDArray[Any] | None:
        """Compare where all tasks are; send the last result to those one unit behind, the state to new ones.

        `position` is None in a task that is new. Returns the result of this task's unit where others have it.
        """
        group = self._group
        if group is None:
            raise ExchangeError("The group has not been joined. Call Lockstep.group first.")
        self._check_pending = False
        unit = -1 if position is None else self._unit
        note = {"unit": unit, "position": position.to_json() if position else []}
        notes = all_gather_json(group, {**note, **self._rendezvous.describe_sums()})
        check_same_sums(notes)
        units = [int(note["unit"]) for note in notes]
        newest = max(units)
        if newest < 0:
            return None
        source = units.index(newest)
        if any(0 <= unit < newest - 1 for unit in units):
            raise TrainingError(f"Tasks are more than one step apart: {units}. Start the job again.")
        result = None
        if newest - 1 in units:
            result = broadcast_value(group, source, self._last_result, keep=unit == newest - 1)
        if -1 in units:
            point = ResumePoint(newest, LoopPosition.from_json(notes[source]["position"]))
            self._transfer_state(group, source, unit, point)
        self._check_pending = True
        if unit != newest - 1 or unit < 0:
            return None
        if not committed:
            raise TrainingError("This task was left behind in the middle of a step. Start the job again.")
        return result

    def _transfer_state(self, group: Group, source: int, unit: int, point: ResumePoint) -> None:
        """Send the state of rank `source` to tasks that are new (their `unit` is -1)."""
        value = self._provider.state_dict() if group.rank == source else None
        state = broadcast_value(group, source, value, keep=unit < 0)
        if unit < 0:
            self._provider.stage(state)
            self._resume_point = point
