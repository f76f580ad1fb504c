"""Decides which events callbacks receive in a process that enters a call in its middle. Pure.

Events and units of a call have one order, in which each has a key. Between two units a task runs the user's
code: the callbacks' events. A task that takes the place of a lost one enters behind the last unit that all
have done, so it receives again the events that the lost one may have been receiving. Others have received all
earlier events to their end: these aren't repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from insitu.train.elastic import BEGIN, END, EPOCH, TEST, LoopPosition

Key = tuple[int, int, int, int]
"""Epoch, part of it, step in that, and whether it comes before the step (0), is it (1) or follows (2)."""

_EPOCH_BEGIN, _STEPS, _TESTS, _EPOCH_END, _EPOCH_UNIT = range(5)
_LAST: Final = 1 << 60
_BEFORE, _UNIT, _BEHIND = range(3)

NOTHING: Final[Key] = (-2, 0, 0, 0)
TRAIN_BEGIN: Final[Key] = (-1, 0, 0, _BEFORE)
_BEGIN_UNIT: Final[Key] = (-1, 0, 0, _UNIT)
GRAPHS: Final[Key] = (-1, 0, 0, _BEHIND)
"""Keras' TensorBoard writes the model's graph."""
TRAIN_END: Final[Key] = (_LAST, 0, 0, _BEFORE)
BEHIND_ALL: Final[Key] = (_LAST, 0, 0, _BEHIND)
_END_UNIT: Final[Key] = (_LAST, 0, 0, _UNIT)


def key_of_epoch_begin(epoch: int) -> Key:
    return epoch, _EPOCH_BEGIN, 0, _BEFORE


def key_of_batch_begin(epoch: int, batch: int) -> Key:
    return epoch, _STEPS, batch, _BEFORE


def key_of_batch_end(epoch: int, batch: int) -> Key:
    return epoch, _STEPS, batch, _BEHIND


def key_of_test_begin(epoch: int) -> Key:
    return epoch, _TESTS, -1, _BEFORE


def key_of_test_batch_begin(epoch: int, batch: int) -> Key:
    return epoch, _TESTS, batch, _BEFORE


def key_of_test_batch_end(epoch: int, batch: int) -> Key:
    return epoch, _TESTS, batch, _BEHIND


def key_of_test_end(epoch: int) -> Key:
    return epoch, _TESTS, _LAST, _BEFORE


def key_of_epoch_end(epoch: int) -> Key:
    return epoch, _EPOCH_END, 0, _BEFORE


def key_behind_epoch(epoch: int) -> Key:
    return epoch, _EPOCH_UNIT, 0, _UNIT


@dataclass(frozen=True, slots=True)
class Entry:
    """The position at which a process enters a call. Without arguments: its beginning."""

    #: Events before this key were received to their end.
    heard: Key = NOTHING
    #: Events before this key may have been received: by a task that was lost.
    repeated: Key = NOTHING
    #: Events from the first key on and before the second belong to steps that another process has done.
    skipped: tuple[Key, Key] = (NOTHING, NOTHING)
    #: Whether all steps are over.
    is_at_end: bool = False

    def was_heard(self, event: Key) -> bool:
        """Return whether callbacks have received an event, so that they don't receive it here."""
        first, end = self.skipped
        return event < self.heard or first <= event < end

    def repeats(self, event: Key) -> bool:
        """Return whether callbacks may receive an event for the second time."""
        return event < self.repeated

    @property
    def is_in_middle(self) -> bool:
        """Whether the process receives less than the whole fit."""
        return self.heard > NOTHING


def enter_beside_others(position: LoopPosition, entry_of_others: Key | None) -> Entry:
    """Return the entry of a task that joins others in the unit at `position`, which they haven't done yet.

    `entry_of_others` is what callbacks had received when the others entered the fit, if they have done
    nothing since but begin it; else None.
    """
    last = _key_of_last_unit(position) if entry_of_others is None else max(GRAPHS, entry_of_others)
    return Entry(last, _key_of(position), is_at_end=position.kind == END)


def enter_at_beginning(heard: Key, epoch: int, step: int) -> Entry:
    """Return the entry of a task that joins others whose callbacks have received the fit's beginning, and
    nothing else in these processes. `heard` is that of their own entry, which is before this step."""
    return Entry(heard, _BEGIN_UNIT, _steps_before(epoch, step))


def enter_without_memory(epoch: int, step: int) -> Entry:
    """Return the entry of a process that resumes at this step with new callbacks: they receive the beginning
    of the fit and of the epoch, and no earlier step."""
    return Entry(skipped=_steps_before(epoch, step))


def enter_by_checkpoint(epoch: int, step: int) -> Entry:
    """Return the entry of a process that resumes from a checkpoint: callbacks had received all before it."""
    return Entry(_key_before_step(epoch, step))


def is_behind(heard: Key, epoch: int, step: int) -> bool:
    """Return whether a record of received events was made behind this step: steps are done again."""
    if step or heard[0] != epoch:
        return heard > _key_before_step(epoch, step)
    return heard > key_of_batch_begin(epoch, 0)


def enter_by_record(
    heard: Key, epoch: int, step: int, steps_before: int | None
) -> tuple[tuple[int, int], Entry]:
    """Return where a worker resumes whose steps before (`epoch`, `step`) are done, and its entry, by a record
    of what its callbacks had `heard`. `steps_before` are the steps of the previous epoch, if that is known.

    If an epoch's steps are all done, and its end may not have been received, it is entered again behind them.
    """
    previous = epoch - 1
    if step == 0 and heard[0] == previous and heard <= key_of_epoch_end(previous) and steps_before:
        heard = max(heard, (previous, _STEPS, steps_before - 1, _UNIT))
        return (previous, steps_before), Entry(heard, (previous, _EPOCH_UNIT, 0, _UNIT))
    before = _key_before_step(epoch, step)
    repeated = NOTHING if step else key_of_batch_begin(epoch, 0)
    return (epoch, step), Entry(max(heard, before), repeated)


def _key_of(position: LoopPosition) -> Key:
    if position.kind == BEGIN:
        return _BEGIN_UNIT
    if position.kind == END:
        return _END_UNIT
    if position.kind == TEST:
        return position.epoch, _TESTS, position.test, _UNIT
    if position.kind == EPOCH:
        return position.epoch, _EPOCH_UNIT, 0, _UNIT
    return position.epoch, _STEPS, position.step, _UNIT


def _key_of_last_unit(position: LoopPosition) -> Key:
    epoch, step = position.epoch, position.step
    if position.kind in (TEST, EPOCH, END) and position.test:
        return epoch, _TESTS, position.test - 1, _UNIT
    if step == 0:
        return _key_before_step(epoch, step)
    return epoch, _STEPS, step - 1, _UNIT


def _steps_before(epoch: int, step: int) -> tuple[Key, Key]:
    return key_of_batch_begin(epoch, 0), key_of_batch_begin(epoch, step)


def _key_before_step(epoch: int, step: int) -> Key:
    """Return a key behind all that belongs to the steps before this one."""
    return key_of_batch_begin(epoch, step) if step else key_of_epoch_begin(epoch)
