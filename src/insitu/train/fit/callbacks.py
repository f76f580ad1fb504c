"""Callbacks under a strategy: who runs which, and who hears of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
from keras.src.utils import is_default

from insitu.context import repeating_events
from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.elastic import LoopPosition
from insitu.train.fit.callback_memory import WRITERS, CallbackMemory, is_of_user
from insitu.train.fit.chief_state import ChiefMemory
from insitu.train.fit.entry import (
    BEHIND_ALL,
    GRAPHS,
    TRAIN_BEGIN,
    TRAIN_END,
    Key,
    key_behind_epoch,
    key_of_batch_begin,
    key_of_batch_end,
    key_of_epoch_begin,
    key_of_epoch_end,
    key_of_test_batch_begin,
    key_of_test_batch_end,
    key_of_test_begin,
    key_of_test_end,
)
from insitu.train.fit.loop_state import LoopState

_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_begin", "on_test_batch_end")
_OLD_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
"""What Keras calls where a callback doesn't have the event itself."""


class FitListener(Protocol):
    """Does what all tasks do at certain points of a fit."""

    can_be_replaced: bool
    """Whether another can take this task's place while the others go on."""

    def share_restored(self) -> None:
        """Give all tasks what a callback that the chief alone runs has restored."""

    def begin_files(self, callbacks: Sequence[Any]) -> None:
        """Take out of files what earlier processes of this task have written of a fit that begins again."""

    def meet(self, position: LoopPosition) -> None:
        """Wait for all tasks: their callbacks have heard of what comes before `position`."""

    def record(self, heard: Key) -> None:
        """Write down what callbacks remember, if no other task can tell the next process of this one: they
        have heard all events before `heard`."""

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


def _keeps_steps(callback: Any) -> bool:
    """Return whether a callback that insitu tells of each step remembers something of it, or writes it."""
    return hasattr(callback, "end_step") and bool(getattr(callback, "remembers_steps", True))


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
    of what others have heard to its end (see `Entry`), so that step numbers, progress bars and schedules go
    on where they were. The exceptions are beginnings at which a callback has opened what can't be copied,
    such as a file.

    Where no callback does anything at the end of a batch, nobody is called then: a call in Keras' way, by a
    thread, with the logs as Python's numbers, takes as long as the step of a small model.
    """

    def __init__(
        self,
        model: Any,
        state: LoopState,
        listener: FitListener,
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
        #: Those that are still to write the model's graph.
        self._graphs = [c for c in own if isinstance(c, keras.callbacks.TensorBoard) and c.write_graph]
        super().__init__(
            # What restores comes first: the others begin by what it has found.
            sorted(own, key=lambda callback: not hasattr(callback, "restores_training")),
            add_history=True,
            add_progbar=params["verbose"] != 0,
            model=model,
            **params,
        )
        #: How many of the callbacks restore a training; they are the first ones.
        self._restoring = sum(hasattr(callback, "restores_training") for callback in own)
        self._step_listeners = [callback for callback in own if hasattr(callback, "end_step")]
        #: Callbacks that may remember something of each batch. Written at each epoch's beginning.
        self._batch_callbacks: list[Any] = []
        #: Whether some of them may draw random numbers.
        self._has_users_batch_callbacks = False
        #: Whether some callback restores weights from files that the chief alone reads.
        self._restores = any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in given)
        #: `model._initial_epoch` before this fit changed it, in a tuple; empty where it hasn't.
        self._initial_epoch: tuple[Any, ...] = ()
        #: What the callbacks remember.
        self.memory = CallbackMemory(given, self._history, is_chief)
        #: Sends all tasks what those of the chief do.
        self.chief_memory = ChiefMemory(self.memory)

    def share_memory(
        self, group: Group, position: LoopPosition, chief_rank: Callable[[Group], int | None]
    ) -> None:
        """Send all tasks what the chief's callbacks remember, if it may have changed. Collective."""
        if self._listener.can_be_replaced and self.chief_memory.is_due(position):
            self.chief_memory.share(group, chief_rank(group), position, self._batch_callbacks)

    def set_model(self, model: Any) -> None:
        """Tell all callbacks of the model. Keras' TensorBoard writes a graph then, of which nobody knows yet:
        it does so once all tasks have met."""
        for callback in self._graphs:
            callback.write_graph = False
        super().set_model(model)
        for callback in self._graphs:
            callback.write_graph = True

    def _write_graphs(self) -> None:
        """Have Keras' TensorBoard do what it left out in `set_model`, unless that was done before."""
        if not self._graphs or self._state.entry.was_heard(GRAPHS):
            return
        with self._calling(GRAPHS):
            for callback in self._graphs:
                callback._write_keras_model_summary()
                callback._should_write_train_graph = True

    def end_unit(self) -> None:
        """Forget what callbacks were like before the unit that was done."""
        self.chief_memory.end_unit()
        self.memory.release()

    def _do_what_is_due(self) -> None:
        due, self.due = self.due, []
        for action in due:
            action()

    # Who hears what

    @contextlib.contextmanager
    def _calling(self, event: Key, callbacks: Sequence[Any] | None = None) -> Iterator[None]:
        """Call callbacks while open: what they find is remembered, so that they can be called again."""
        if self._listener.can_be_replaced:
            self._state.gap.open(with_random=callbacks is None or self._has_users_batch_callbacks)
            self.memory.keep(callbacks)
        with repeating_events() if self._state.entry.repeats(event) else contextlib.nullcontext():
            yield

    def _set_up(self, event: str, *args: Any, but: Sequence[Any] = ()) -> None:
        """Let those callbacks hear a beginning again that have something from there that can't be copied.
        Those of `but` have heard of it here."""
        state = self._state
        with state.setting_up(), repeating_events():
            for callback in self.callbacks:
                if any(callback is one for one in but) or callback is self._progbar:
                    continue
                is_board = isinstance(callback, keras.callbacks.TensorBoard)
                if not is_board and self.memory.is_made_by(event, callback, state.memory_at_entry):
                    getattr(callback, event)(*args)
            self.memory.note_uncopied(event)
        _set_up_by_hand(self.callbacks, event)

    # Events

    def on_train_begin(self, logs: Any = None) -> None:
        """Have Keras begin with the epoch in which the fit is taken up, if it is."""
        state = self._state
        before = self.model._initial_epoch
        self._on_begin()
        called: list[Any] = []
        with self._calling(TRAIN_BEGIN):
            for callback in self.callbacks:
                # The first ones may find out where the fit is taken up.
                if not state.entry.was_heard(TRAIN_BEGIN):
                    if len(called) == self._restoring:
                        self._listener.begin_files(self.callbacks[len(called) :])
                    called.append(callback)
                    callback.on_train_begin(logs)
            self.memory.note_uncopied("on_train_begin")
        if state.entry.was_heard(TRAIN_BEGIN):
            # Callbacks get the state that they have in the middle of the fit.
            self.memory.warn_of_uncopied(state.memory_at_entry)
            with self.memory.continuing_files(state.memory_at_entry):
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
        self._write_graphs()
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
                self.memory.note_uncopied("on_epoch_begin")
            self._listener.record(key_of_batch_begin(epoch, 0))
        # Now, since a callback may have made its methods at the epoch's beginning.
        self._heard = frozenset(e for e in _BATCH_EVENTS if any(_hears(c, e) for c in self.callbacks))
        self._batch_callbacks = [
            callback
            for callback in self.callbacks
            if callback is not self._progbar
            and callback is not self._history
            and (any(_hears(callback, e) for e in _BATCH_EVENTS) or _keeps_steps(callback))
        ]
        self._has_users_batch_callbacks = any(map(is_of_user, self._batch_callbacks))
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

    def on_test_begin(self, logs: Any = None) -> None:
        self.chief_memory.all_due = True
        event = key_of_test_begin(self._state.position.epoch)
        self._listener.record(event)
        if self._state.entry.was_heard(event):
            self._on_begin()
            if not self._state.entry.was_heard(key_of_test_end(self._state.position.epoch)):
                self._set_up("on_test_begin", logs)
            return
        with self._calling(event):
            super().on_test_begin(logs)
            self.memory.note_uncopied("on_test_begin")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        event = key_of_test_batch_begin(self._state.position.epoch, batch)
        if "on_test_batch_begin" in self._heard and not self._state.entry.was_heard(event):
            with self._calling(event, self._batch_callbacks):
                super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        event = key_of_test_batch_end(self._state.position.epoch, batch)
        if "on_test_batch_end" in self._heard and not self._state.entry.was_heard(event):
            with self._calling(event, self._batch_callbacks):
                super().on_test_batch_end(batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        event = key_of_test_end(self._state.position.epoch)
        if self._state.entry.was_heard(event):
            self._on_end()
            return
        with self._calling(event):
            super().on_test_end(logs)

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
        # Where the whole fit was done before, no epoch has begun, and Keras knows no logs.
        logs = logs or self._state.epoch_logs
        with self._calling(TRAIN_END):
            super().on_train_end(logs)
        self._listener.meet(self._state.position.at_end())
        self._listener.record(BEHIND_ALL)


def _set_up_by_hand(callbacks: Sequence[Any], event: str) -> None:
    """Make what callbacks of Keras have from the beginning of something, without what else they do then."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            # Without a line that an epoch begins: it stands there already.
            callback._called_in_fit = True
            callback._reset_progbar()
            callback._maybe_init_progbar()
        elif isinstance(callback, keras.callbacks.TensorBoard):
            if event == "on_train_begin":
                callback._push_writer(callback._train_writer, callback._global_train_batch)
            elif event == "on_test_begin":
                callback._push_writer(callback._val_writer, callback._global_test_batch)
