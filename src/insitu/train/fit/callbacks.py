"""Callbacks under a strategy: who runs which, and who hears of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras
from keras.src.utils import is_default

from insitu.errors import TrainingError
from insitu.train.fit.callback_memory import WRITERS, CallbackMemory
from insitu.train.fit.loop_state import LoopState

_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end")
_OLD_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
"""What Keras calls where a callback doesn't have the event itself."""


class EpochListener(Protocol):
    """Does what all tasks do at the end of an epoch and of a fit."""

    def share_restored(self) -> None:
        """Give all tasks what a callback that the chief alone runs has restored."""

    def end_epoch(self) -> None:
        """Finish an epoch: all callbacks have heard of its end."""

    def end_fit(self) -> None:
        """Finish a fit whose steps are all done, before callbacks hear of its end."""


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks in what a script gives to `fit`: one, several in lists, or a list of Keras' own,
    less what Keras has added to that."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        added = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
        return [callback for callback in callbacks.callbacks if not isinstance(callback, added)]
    return list(keras.tree.flatten(callbacks)) if callbacks else []


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


def own_callbacks(callbacks: Any, is_chief: bool) -> list[Any]:
    """Return the callbacks that this task runs, out of those that the script gives in every task."""
    return [c for c in flatten_callbacks(callbacks) if is_chief or not isinstance(c, WRITERS)]


def _hears(callback: Any, event: str) -> bool:
    """Return whether a callback does something at an event of batches."""
    if not getattr(callback, "hears_batches", True):
        return False
    if type(callback) is keras.callbacks.ProgbarLogger and callback.verbose != 1:
        return False  # it would count them; its list sets the number
    names = (event, _OLD_NAMES.get(event, event))
    return not all(is_default(getattr(callback, name, None)) for name in names)


class EpochCallbacks(keras.callbacks.CallbackList):
    """Calls callbacks as Keras' own list does, and enters each epoch where the position is.

    A fit that is taken up begins an epoch in its middle: its first steps are skipped, and no callback hears
    of them, so that step numbers, progress bars and schedules go on where they were.

    Where no callback does anything at the end of a batch, nobody is called then: a call in Keras' way, by a
    thread, with the logs as Python's numbers, takes as long as the step of a small model.
    """

    def __init__(
        self,
        model: Any,
        state: LoopState,
        listener: EpochListener,
        given: list[Any],
        is_chief: bool,
        **params: Any,
    ) -> None:
        self._state = state
        self._listener = listener
        #: Events of batches at which some callback does something. Written at each epoch's beginning.
        self._heard = frozenset(_BATCH_EVENTS)
        #: Callbacks that insitu itself tells of each step. Written by `__init__`.
        self._step_listeners: list[Any] = []
        #: What to do once all callbacks have heard of the present event. Written by callbacks.
        self.due: list[Callable[[], None]] = []
        own = own_callbacks(given, is_chief)
        super().__init__(
            # What restores comes first: the others begin by what it has found.
            sorted(own, key=lambda callback: not hasattr(callback, "restores_training")),
            add_history=True,
            add_progbar=params["verbose"] != 0,
            model=model,
            **params,
        )
        self._step_listeners = [callback for callback in own if hasattr(callback, "end_step")]
        #: Whether some callback restores weights from files that the chief alone reads.
        self._restores = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in given)
        #: `model._initial_epoch` before this fit changed it, in a tuple; empty where it hasn't.
        self._initial_epoch: tuple[Any, ...] = ()
        #: What the callbacks remember.
        self.memory = CallbackMemory(given, self._history, is_chief)

    def _do_what_is_due(self) -> None:
        due, self.due = self.due, []
        for action in due:
            action()

    def on_train_begin(self, logs: Any = None) -> None:
        """Have Keras begin with the epoch in which the fit is taken up, if it is."""
        before = self.model._initial_epoch
        super().on_train_begin(logs)
        if self._restores:
            self._listener.share_restored()
        if self._state.position.epoch:
            self._initial_epoch = (before,)
            self.model._initial_epoch = self._state.position.epoch

    def restore_initial_epoch(self) -> None:
        """Let the model's next fit begin where Keras would begin it."""
        for before in self._initial_epoch:
            self.model._initial_epoch = before

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._state.begin_epoch(epoch)
        self._state.restore_callbacks(epoch_has_begun=False)
        super().on_epoch_begin(epoch, logs)
        self._state.restore_callbacks(epoch_has_begun=True)
        # Now, since a callback may have made its methods at the epoch's beginning.
        self._heard = frozenset(e for e in _BATCH_EVENTS if any(_hears(c, e) for c in self.callbacks))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if "on_train_batch_begin" in self._heard and batch >= self._state.first_step:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= self._state.first_step:
            for listener in self._step_listeners:
                listener.end_step(logs)
            if "on_train_batch_end" in self._heard:
                super().on_train_batch_end(batch, logs)
            if self.due:
                self._do_what_is_due()
        elif batch == self._state.first_step - 1:
            self._state.end_skipped_steps()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if "on_test_batch_begin" in self._heard and batch >= self._state.first_test:
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if "on_test_batch_end" in self._heard and batch >= self._state.first_test:
            super().on_test_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.end_steps()
        if self._progbar is not None:
            self._progbar.seen = self._state.position.step
        super().on_epoch_end(epoch, logs)
        self._state.report_epoch_logs(logs or {})
        self._listener.end_epoch()
        self._do_what_is_due()

    def on_train_end(self, logs: Any = None) -> None:
        # Where the whole fit was done before, no epoch has begun.
        self._state.restore_callbacks(epoch_has_begun=False)
        self._listener.end_fit()
        super().on_train_end(logs)
