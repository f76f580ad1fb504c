"""The position of a loop in its data, which a checkpoint of the loop holds beside its model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import index
from typing import Any, TypeVar

from insitu.base.errors import InputError

Item = TypeVar("Item")


class DataPosition:
    """Counts epochs and their steps: each iteration of the data is an epoch."""

    def __init__(self) -> None:
        #: The epoch under way, or the next one.
        self.epoch = 0
        #: Its steps that were given out.
        self.step = 0
        #: Whether the script has set the start of the next iteration.
        self.is_said = False
        #: Whether an iteration has begun in this process.
        self.has_begun = False
        #: The iteration under way, as `begin` has returned it.
        self._iteration: object | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration has begun, and hasn't ended."""
        return self._iteration is not None

    def move(self, epoch: int, step: int = 0) -> None:
        """Let the next iteration begin here."""
        self.epoch, self.step, self._iteration = epoch, step, None

    def begin(self) -> object:
        """Begin an iteration at the position. One under way, which was left in its middle, is over."""
        self.leave()
        self.is_said, self.has_begun, self._iteration = False, True, object()
        return self._iteration

    def leave(self) -> None:
        """End the iteration under way, if there is one."""
        self.end(self._iteration)

    def advance(self, iteration: object) -> None:
        """Count a step that an iteration gives out."""
        if iteration is self._iteration:
            self.step += 1

    def end(self, iteration: object | None) -> None:
        """End an iteration, unless another has begun since: the next epoch follows."""
        if iteration is not None and iteration is self._iteration:
            self.move(self.epoch + 1)

    def read_epoch(
        self, read: Callable[[int, int], Iterator[Item | None]], passes: int | None, steps_of_pass: int
    ) -> Iterator[Item]:
        """Yield the items of the next epoch, which has so many passes; None: no end. `read` yields those of a
        pass, counted over all epochs, from a step on, and None for a step without one."""
        iteration = self.begin()
        first, step = (0, self.step) if passes == 1 else divmod(self.step, steps_of_pass)
        number = self.epoch * (passes or 1)
        end = None if passes is None else number + passes
        number += first
        try:
            while end is None or number < end:
                for item in read(number, step):
                    self.advance(iteration)
                    if item is not None:
                        yield item
                number, step = number + 1, 0
        finally:
            self.end(iteration)

    def warn_of_restart(self, incarnation: int, data: object) -> None:
        """Warn, before the first iteration, in a task that was started again and hasn't set its position:
        nothing knows here of a checkpoint from which the loop continues."""
        if incarnation > 1 and not (self.is_said or self.has_begun):
            warnings.warn(
                "This task was started again. A loop that continues from a checkpoint says where its data "
                "stands, by set_epoch(N) or load_state_dict(...). Received: a loop that begins with epoch 0 "
                f"of {data!r}.",
                stacklevel=3,
            )


class PositionedData:
    """Data of which each iteration is an epoch, and which knows the position of its iterations."""

    def __init__(self) -> None:
        self._position = DataPosition()
        #: The data that a strategy has distributed, which `fit` takes instead. Written by the strategy.
        self.whole: Any = None

    def state_dict(self) -> dict[str, int]:
        """Return `{"epoch", "step"}`, the next step of a loop that continues from here.

        An epoch that a loop has left in its middle is over when its iterator is gone.
        """
        return {"epoch": self._position.epoch, "step": self._position.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the step at which `state_dict` was called, in this process or in
        another. Raises InputError."""
        try:
            epoch, step = index(state["epoch"]), index(state.get("step", 0))
        except (KeyError, TypeError, AttributeError):
            epoch = step = -1
        if min(epoch, step) < 0:
            raise InputError(
                'A position in data is {"epoch": E, "step": S}, both 0 or more, as state_dict() returns it. '
                f"Received: {state!r}"
            )
        self._position.move(epoch, step)
        self._position.is_said = True

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the beginning of an epoch, counted from 0. Raises InputError."""
        self.load_state_dict({"epoch": epoch})
