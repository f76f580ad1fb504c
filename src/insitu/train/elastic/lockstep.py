"""Keeps the tasks of a group in step, and lets another take the place of one that is lost.

All that tasks do together is cut into *units*: a training step, a test step, a prediction, a broadcast of
the first weights. A unit computes, moves buffers and ends with one `all_gather`, whose result every task has
before it changes anything of its model. So when a peer is lost each survivor is in one of two places:

- in the newest unit, whose results nobody has: it is done again from its beginning, by all;
- in the last gather of the unit before: then others have its result, and send it.

Nothing has to be rolled back, and no survivor needs another's state. A replacement runs the script from its
start, is given the state of a survivor in the newest unit, as it was behind the previous unit, and skips
everything up to there. Then it runs the code between the two units, as callbacks, and does the newest one
with the others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import keras
import numpy as np
from numpy.typing import NDArray

import insitu
from insitu.base.context import ALLOW_MIXED_ENV
from insitu.base.errors import (
    CollectiveMismatch,
    ExchangeError,
    NumericsMismatch,
    PeerLost,
    StaleGeneration,
    TrainingError,
)
from insitu.exchange import Group, parse_address
from insitu.train.backends import active_backend
from insitu.train.collectives import all_gather_json, broadcast_value
from insitu.train.elastic.divergence import Fingerprint, check_equal
from insitu.train.elastic.position import LOOP, TRAIN, LoopPosition

Work = Callable[[Group], NDArray[Any]]
"""All of a unit but its last gather. Returns what this task adds to that. May be called again."""


class RetryStep(Exception):
    """Internal: the unit was interrupted and must be repeated, with the shards that this task then has."""


class GenerationChanged(Exception):
    """Internal: this generation of the group has ended, since membership changed."""


class ElasticRendezvous(Protocol):
    """Forms the group, at first and after each change of membership."""

    def join(self) -> Group:
        """Form the group with the others for the first time in this process."""

    def rejoin(self, group: Group, lost: Exception) -> None:
        """Wait for the next generation and form `group` again. Raises TrainingError when none comes."""

    def raise_if_superseded(self, group: Group) -> None:
        """Raise GenerationChanged if there is a newer generation than the group's."""

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
        """Keep a survivor's `state` until the script has reached the others' position."""

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
        an empty array if this task has nothing to do together with others."""


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
            RetryStep: if it must be repeated.
            CollectiveMismatch: if other tasks have ended, and this is a training step.
            TrainingError: if the script doesn't lead to where the others are, or they don't come back.
            Diverged: if replicas aren't equal.
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
            raise refuse_without(ended, None, f"training continues with {at} at {find_place()}")

    def _check_can_retry(self, position: LoopPosition) -> None:
        """Raise CollectiveMismatch for an interrupted step of a script's own loop: only the script has its
        rows."""
        if position.kind == LOOP:
            raise refuse_without(
                self._rendezvous.ended or ("another task",),
                None,
                "the others continue with a step of their loop",
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
        """Form the next generation. Returns the result of the unit if others have it already."""
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

        `position` is None in a task that is new. Returns the result of this task's unit if others have it.
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


# Checks that all tasks make the same call. One that only some make is an error before it computes


_ROW_BYTES = 248
"""Bytes of a record of a call. No other gather of bytes is of that size, so one that meets it differs."""
_MAX_PLACE = 100
_LIBRARIES = (
    os.path.dirname(os.path.abspath(insitu.__file__)) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)
"""Prefixes of paths of files that aren't the user's."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call of the script, as the tasks compare it."""

    #: The task that makes it, such as `worker:0`.
    task: str
    #: The name of the method, such as `fit`.
    name: str
    #: Number of the call among those of the script, from 0; None if calls aren't counted.
    number: int | None = None
    #: 1 in a call of the script, 2 in one that a callback makes in it.
    depth: int = 1
    #: Its place in the script, such as `train.py:12`; "" if unknown.
    place: str = ""

    def __str__(self) -> str:
        count = "" if self.number is None else f" as call {self.number + 1}"
        inner = " inside another call" if self.depth > 1 else ""
        return f"{self.task} makes {self.name}(){count}{inner}{f' at {self.place}' if self.place else ''}"

    def to_row(self) -> NDArray[np.uint8]:
        """Return the record as bytes of a fixed number."""
        place = self.place[-_MAX_PLACE:]
        while True:
            text = json.dumps([self.task, self.name, self.number, self.depth, place]).encode()
            if len(text) <= _ROW_BYTES:
                return np.frombuffer(text.ljust(_ROW_BYTES, b"\0"), np.uint8)
            place = place[1:]

    @classmethod
    def from_row(cls, row: NDArray[np.uint8]) -> CallRecord:
        """Return the record that `to_row` wrote."""
        return cls(*json.loads(row.tobytes().rstrip(b"\0")))


def find_place() -> str:
    """Return the line of the script that is running, as `train.py:12`; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def check_same_call(rows: NDArray[Any]) -> None:
    """Raise CollectiveMismatch unless all records in `rows`, one of each shard, are of the same call."""
    records = list(dict.fromkeys(CallRecord.from_row(row) for row in rows))
    if len({(record.name, record.number, record.depth) for record in records}) > 1:
        raise CollectiveMismatch(
            "Under a strategy all workers make the same calls in the same order. Received: "
            f"{'; '.join(map(str, records))}. Make the call in every worker. What one worker evaluates or "
            "predicts alone comes at the end of the script, after the last call of the others."
        )


def refuse_different(own: CallRecord, error: Exception) -> CollectiveMismatch:
    """Return the error for a call that met another operation of other tasks, which `error` names."""
    operations = str(error).partition("Received: ")[2].partition(". ")[0]
    return CollectiveMismatch(
        "Under a strategy all workers make the same calls in the same order. Received: "
        f"{own}, while another worker does something else ({operations}). Make the call in every worker."
    )


def refuse_without(ended: Sequence[str], call: CallRecord | None, what: str = "") -> CollectiveMismatch:
    """Return the error for a call, or for `what` is being done, that needs tasks whose scripts have ended."""
    names = ", ".join(ended)
    doing = str(call) if call is not None else what
    return CollectiveMismatch(
        "Under a strategy all workers train together, in the same calls. Received: "
        f"{doing}, and the script of {names} has ended without that. Make the call in every worker; alone a "
        "worker can call evaluate(), predict() and save() after the others have ended."
    )


# Finds hosts whose backends round differently: other processors, other compiled kernels, other libraries.
#
# Replicas stay equal only if the same operations on the same numbers give the same bits. Each task of a
# job on several hosts does a few small ones when it joins, and compares a hash of the results with those of
# others. It is no proof: other operations, or other sizes, may still differ. For that replicas are compared
# at times


@functools.cache
def probe_sums() -> str:
    """Return a hash of 16 hex digits over what the backend computes of fixed numbers, in float32.

    The sizes are no multiples of vectors, so that sums are taken in the order of the kernels here.
    """
    # Without a generator, whose own kernels may differ: exact in float32, and of different sizes.
    numbers = ((np.arange(70_003, dtype=np.int64) * 7919) % 10_007 - 5003).astype(np.float32) / 4099
    shapes = ((67, 513), (513, 37), (2, 19, 19, 5), (3, 3, 5, 11), numbers.shape)
    given = [numbers[: math.prod(shape)].reshape(shape) for shape in shapes]
    found = hashlib.sha256()
    # JAX compiles it as a whole: that takes less time than each operation alone.
    compute = active_backend().compile_once(_compute)
    for result in compute(*map(keras.ops.convert_to_tensor, given)):
        found.update(np.ascontiguousarray(keras.ops.convert_to_numpy(result)).tobytes())
    return found.hexdigest()[:16]


def _compute(left: Any, right: Any, image: Any, kernel: Any, long: Any) -> tuple[Any, ...]:
    """Return what is compared."""
    ops = keras.ops
    return (
        ops.matmul(left, right),
        ops.conv(image, kernel, padding="same", data_format="channels_last"),
        ops.sum(long),
        ops.exp(long),
        ops.tanh(long),
    )


def describe_sums(addresses: Sequence[str], node: str) -> dict[str, str]:
    """Return a task's note on its sums for those at `addresses`; empty if all are on one host, or hosts may
    differ."""
    if os.environ.get(ALLOW_MIXED_ENV) == "1" or len({parse_address(each)[0] for each in addresses}) < 2:
        return {}
    return {"sums": probe_sums(), "node": node}


def check_same_sums(notes: Sequence[Mapping[str, Any]]) -> None:
    """Raise NumericsMismatch if tasks, which have written these notes, differ in their sums."""
    nodes: dict[str, list[str]] = {}
    for note in notes:
        if "sums" in note:
            nodes.setdefault(str(note["sums"]), []).append(str(note["node"]))
    if len(nodes) > 1:
        listed = "; ".join(f"{', '.join(sorted(set(those)))}: {sums}" for sums, those in nodes.items())
        raise NumericsMismatch(
            "The backend must give the same bits on all hosts of a job, or replicas wouldn't stay equal. "
            f"Received: other hashes of the same small sums; {listed}. `insitu nodes` shows the processors. "
            "Use hosts of one kind, with the same libraries, or start with --allow-mixed-processors"
        )
