"""Names a task's position in its training loops: the same name for the same unit of work in every task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["call", "setup", "restore", "begin", "train", "test", "epoch", "end", "predict", "loop"]

CALL: Final = "call"
"""Compares which call the tasks make, before anything of it is done."""
SETUP: Final = "setup"
"""Gives all replicas the first weights, before a model's first call."""
RESTORE: Final = "restore"
"""Gives all replicas the state of a checkpoint, at the beginning of a fit."""
BEGIN: Final = "begin"
"""The beginning of a fit: callbacks have received it in all tasks."""
TRAIN: Final = "train"
"""A training step."""
TEST: Final = "test"
"""A step of `evaluate`, or of the validation in a fit."""
EPOCH: Final = "epoch"
"""The end of an epoch, when the chief sends the state of callbacks that write files."""
END: Final = "end"
"""The end of a call: callbacks have received it in all tasks."""
PREDICT: Final = "predict"
"""A step of `predict`."""
LOOP: Final = "loop"
"""A step of a script's own loop, which no replacement can enter."""


@dataclass(frozen=True, slots=True)
class LoopPosition:
    """Names one unit of work: the one that comes next in the call under way, or the one that is being done.

    Equal in all tasks that do the same unit, also in a replacement, which runs the script from its start.
    """

    #: Number of the script's call of `fit`, `evaluate` or `predict`, from 0. Counted by `CallLog`.
    call: int
    #: Kind of the unit's work.
    kind: Kind
    #: 1 in a call of the script, 2 in one that a callback makes in it, 0 outside of calls.
    depth: int = 0
    #: Keras' epoch, from 0; -1 before training.
    epoch: int = 0
    #: Steps of the epoch that are done, in `predict` those of the call: the number of the next one. -1 before
    #: training.
    step: int = 0
    #: Test steps that are done since the tests began: the number of the next one.
    test: int = 0

    @property
    def is_setup(self) -> bool:
        """Whether replicas may differ before the unit, and nothing of the call's work has begun."""
        return self.kind in (CALL, SETUP, RESTORE)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All but the kind, for fingerprints."""
        return self.call, self.depth, self.epoch, self.step, self.test

    def at_step(self, epoch: int, step: int) -> LoopPosition:
        """Return the position before training step `step` of `epoch`, in the same call."""
        return LoopPosition(self.call, TRAIN, self.depth, epoch, step)

    def next_step(self) -> LoopPosition:
        """Return the position behind this training step."""
        return LoopPosition(self.call, TRAIN, self.depth, self.epoch, self.step + 1)

    def at_test(self, test: int) -> LoopPosition:
        """Return the position before test step `test`, as many training steps being done as now."""
        return LoopPosition(self.call, TEST, self.depth, self.epoch, self.step, test)

    def at_epoch_end(self) -> LoopPosition:
        """Return the position once steps and tests of the epoch are done."""
        return LoopPosition(self.call, EPOCH, self.depth, self.epoch, self.step, self.test)

    def at_begin(self) -> LoopPosition:
        """Return the position once callbacks have received the beginning of the fit."""
        return LoopPosition(self.call, BEGIN, self.depth, self.epoch, self.step)

    def at_end(self) -> LoopPosition:
        """Return the position once callbacks have received the end of the call."""
        return LoopPosition(self.call, END, self.depth, self.epoch, self.step, self.test)

    def at_prediction(self, step: int) -> LoopPosition:
        """Return the position before step `step` of a `predict`."""
        return LoopPosition(self.call, PREDICT, self.depth, 0, step)

    def to_json(self) -> list[Any]:
        """Return the fields as a list that JSON keeps as it is."""
        return [self.call, self.kind, self.depth, self.epoch, self.step, self.test]

    @classmethod
    def from_json(cls, fields: list[Any]) -> LoopPosition:
        """Return the position that `to_json` wrote."""
        return cls(*fields)

    def __str__(self) -> str:
        test = f" test {self.test}" if self.kind == TEST else ""
        return f"call {self.call} {self.kind} epoch {self.epoch} step {self.step}{test}"


CUSTOM_LOOP = LoopPosition(0, LOOP)
"""The position of any step of a script's own loop."""
