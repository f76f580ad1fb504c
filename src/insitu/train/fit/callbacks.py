"""Callbacks of `fit` under a strategy: the events that they receive, and which callbacks are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import keras

from insitu.base.errors import TrainingError
from insitu.base.plugins import EXTENSIONS, load_plugin
from insitu.base.tracking import TRACK_ENV
from insitu.train.fit.callback_list import CallListener, ResumableCallbacks, own_callbacks
from insitu.train.fit.entry import (
    BEHIND_ALL,
    GRAPHS,
    TRAIN_BEGIN,
    TRAIN_END,
    key_behind_epoch,
    key_of_batch_begin,
    key_of_batch_end,
    key_of_epoch_begin,
    key_of_epoch_end,
)
from insitu.train.fit.loop_state import LoopState


class FitListener(CallListener, Protocol):
    """Does what all tasks do at certain points of a fit."""

    @property
    def has_forgotten(self) -> bool:
        """Whether nobody knows here which events earlier processes of this task have received."""

    def share_restored(self) -> None:
        """Give all tasks what a callback that the chief alone runs has restored."""

    def end_fit(self) -> None:
        """Finish a fit whose steps are all done, before callbacks receive its end."""


def check_callbacks(callbacks: list[Any]) -> None:
    """Raise TrainingError for callbacks that undo each other's work."""
    restoring = [c for c in callbacks if getattr(c, "restores_training", False)]
    keras_own = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
    if restoring and keras_own:
        raise TrainingError(
            "One callback restores a training. Received: insitu.BackupAndRestore and "
            "keras.callbacks.BackupAndRestore in one fit, of which the second would overwrite what the first "
            "has restored. Leave keras.callbacks.BackupAndRestore out."
        )


def add_tracker(given: list[Any]) -> list[Any]:
    """Return the callbacks of a fit with the one that `insitu start --track` asks for, unless it is there."""
    if not os.environ.get(TRACK_ENV):
        return given
    made = load_plugin(EXTENSIONS, "tracking").make_callback_of_job(given)
    return given if made is None else [*given, made]


_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", *ResumableCallbacks.batch_events)


class EpochCallbacks(ResumableCallbacks):
    """Calls the callbacks of a fit, and enters each epoch at the position.

    A fit that is taken up begins an epoch in its middle: its first steps are skipped, so that step numbers,
    progress bars and schedules continue where they were.
    """

    batch_events = _BATCH_EVENTS
    _listener: FitListener

    def __init__(
        self,
        model: Any,
        state: LoopState,
        listener: FitListener,
        given: list[Any],
        is_chief: bool,
        **params: Any,
    ) -> None:
        # A callback that restores comes first: the others begin with its findings.
        own = own_callbacks(given, is_chief)
        own.sort(key=lambda callback: not hasattr(callback, "restores_training"))
        #: Callbacks that insitu itself notifies of each step.
        self._step_listeners = [callback for callback in own if hasattr(callback, "end_step")]
        #: To be called once all callbacks have received the present event. Written by callbacks.
        self.due: list[Callable[[], None]] = []
        super().__init__(model, state, listener, given, own, is_chief, add_history=True, **params)
        #: How many of the callbacks restore a training; they are the first ones.
        self._restoring = sum(hasattr(callback, "restores_training") for callback in own)
        #: Whether some callback restores weights from files that the chief alone reads.
        self._restores = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in given)
        #: `model._initial_epoch` before this fit changed it, in a tuple; empty if it hasn't.
        self._initial_epoch: tuple[Any, ...] = ()

    def _do_what_is_due(self) -> None:
        due, self.due = self.due, []
        for action in due:
            action()

    def _set_up_by_hand(self, event: str, *args: Any) -> None:
        if self._progbar is not None:
            # Without a line that an epoch begins: it is already there.
            self._progbar._called_in_fit = True
            self._progbar._reset_progbar()
            self._progbar._maybe_init_progbar()
        super()._set_up_by_hand(event, *args)

    # Events

    def on_train_begin(self, logs: Any = None) -> None:
        """Have Keras begin with the epoch in which the fit is taken up, if it is."""
        state = self._state
        before = self.model._initial_epoch
        self._listener.name_uncopied(self.memory)
        self._on_begin()
        called: list[Any] = []
        with self._calling(TRAIN_BEGIN):
            for callback in self.callbacks:
                # The first ones may find the position at which the fit is taken up.
                if not state.entry.was_heard(TRAIN_BEGIN):
                    if len(called) == self._restoring:
                        self._listener.begin_files(self.callbacks[len(called) :])
                    called.append(callback)
                    callback.on_train_begin(logs)
            self.memory.record_uncopied("on_train_begin")
        if state.entry.was_heard(TRAIN_BEGIN):
            state.record_restored(is_forgotten=self._listener.has_forgotten)
            # Callbacks get the state that they have in the middle of the fit.
            self.memory.warn_of_uncopied(state.memory_at_entry)
            with self.memory.continuing_files(state.memory_at_entry, self._listener.take_over_files()):
                self._set_up("on_train_begin", logs, but=called)
        if self._restores:
            self._listener.share_restored()
        if state.position.epoch or state.entry.is_at_end:
            self._initial_epoch = (before,)
            at_end = state.entry.is_at_end
            self.model._initial_epoch = self.params["epochs"] if at_end else state.position.epoch
        if state.entry.is_at_end:
            state.enter_stop()
        self._listener.meet(state.position.at_begin())
        if not state.entry.was_heard(GRAPHS):
            self._write_graphs(GRAPHS)
        if not state.entry.is_in_middle:
            self._listener.record(key_of_epoch_begin(0))

    def restore_initial_epoch(self) -> None:
        """Let the model's next fit begin where Keras would begin it."""
        for before in self._initial_epoch:
            self.model._initial_epoch = before

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        event = key_of_epoch_begin(epoch)
        self._state.begin_epoch(epoch)
        if self._state.entry.was_heard(event):
            self._set_up("on_epoch_begin", epoch, logs)
        else:
            with self._calling(event):
                super().on_epoch_begin(epoch, logs)
                self.memory.record_uncopied("on_epoch_begin")
            self._listener.record(key_of_batch_begin(epoch, 0))
        # Now, since a callback may have made its methods at the epoch's beginning.
        self._find_batch_callbacks()
        self.chief_memory.all_due = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if "on_train_batch_begin" not in self._heard:
            return
        state = self._state
        event = key_of_batch_begin(state.position.epoch, batch)
        if not state.entry.was_heard(event):
            with self._calling(event, self._batch_callbacks):
                super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state = self._state
        # The last execution of an epoch may have fewer steps than Keras counts.
        last = min(batch, state.position.step - 1)
        if last == state.first_step - 1:
            state.end_skipped_steps()
        if not self._heard and not self._step_listeners:
            return
        event = key_of_batch_end(state.position.epoch, last)
        if state.entry.was_heard(event):
            return
        if not self._batch_callbacks:
            # Nothing to remember for: not to lose time here.
            self._end_batch(batch, logs)
            return
        with self._calling(event, self._batch_callbacks):
            self._end_batch(batch, logs)

    def _end_batch(self, batch: int, logs: Any) -> None:
        for listener in self._step_listeners:
            listener.end_step(logs)
        if "on_train_batch_end" in self._heard:
            super().on_train_batch_end(batch, logs)
        if self.due:
            self._do_what_is_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        state = self._state
        state.end_steps()
        if self._progbar is not None:
            self._progbar.seen = state.position.step
        event = key_of_epoch_end(epoch)
        if state.entry.heard == event and state.epoch_logs:
            logs = state.epoch_logs
        state.epoch_logs = logs or {}
        self._listener.record(event)
        with self._calling(event):
            super().on_epoch_end(epoch, logs)
            state.report_epoch_logs(logs or {})
        self._listener.meet(state.position)
        self._listener.record(key_behind_epoch(epoch))
        state.end_epoch()
        self._do_what_is_due()

    def on_train_end(self, logs: Any = None) -> None:
        self._listener.end_fit()
        # If the whole fit was done before, no epoch has begun, and Keras knows no logs.
        logs = logs or self._state.epoch_logs
        with self._calling(TRAIN_END):
            super().on_train_end(logs)
        self._listener.meet(self._state.position.at_end())
        self._listener.record(BEHIND_ALL)
