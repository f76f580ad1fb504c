"""Calls callbacks so that another task can call them again: in `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
from keras.src.utils import is_default

from insitu.base.context import repeating_events
from insitu.base.measure.time_account import ACCOUNT, CALLBACKS
from insitu.exchange import Group
from insitu.train.elastic import LoopPosition
from insitu.train.fit.callback_memory import CallbackMemory, is_of_chief, is_of_user
from insitu.train.fit.chief_state import ChiefMemory
from insitu.train.fit.entry import (
    Key,
    key_of_test_batch_begin,
    key_of_test_batch_end,
    key_of_test_begin,
    key_of_test_end,
)
from insitu.train.fit.loop_state import LoopState

_OLD_NAMES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
"""Methods that Keras calls if a callback doesn't have the event itself."""


class CallListener(Protocol):
    """Does what all tasks do at certain points of a call."""

    can_be_replaced: bool
    """Whether another can take this task's place while the others continue."""

    def name_uncopied(self, memory: CallbackMemory) -> None:
        """Have the chief name what callbacks keep that is lost with their process, before that happens."""

    def hear(self, position: LoopPosition, event: Key) -> bool:
        """Note that callbacks are about to receive an event of the call at `position`; return whether they
        may have received it in an earlier process of this task."""

    def begin_files(self, callbacks: Sequence[Any]) -> None:
        """Take out of files what earlier processes of this task have written of a call that begins again."""

    def take_over_files(self) -> list[str]:
        """Return who has written the chief's files of this call before; this process does from now on."""

    def meet(self, position: LoopPosition) -> None:
        """Wait for all tasks: their callbacks have received all events before `position`."""

    def record(self, heard: Key) -> None:
        """Write down what callbacks remember, if no other task can inform the next process of this one: they
        have received all events before `heard`."""


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks in what a script gives to a call: one, several in lists, or a list of Keras' own,
    less what Keras has added to that."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        added = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
        return [callback for callback in callbacks.callbacks if not isinstance(callback, added)]
    return list(keras.tree.flatten(callbacks)) if callbacks else []


def own_callbacks(callbacks: Any, is_chief: bool) -> list[Any]:
    """Return the callbacks that this task runs, out of those that the script gives in every task."""
    return [c for c in flatten_callbacks(callbacks) if is_chief or not is_of_chief(c)]


def _keeps_steps(callback: Any) -> bool:
    """Return whether a callback that insitu notifies of each step remembers something of it, or writes it."""
    return hasattr(callback, "end_step") and bool(getattr(callback, "remembers_steps", True))


def _hears(callback: Any, event: str) -> bool:
    """Return whether a callback does something at an event of batches."""
    if not getattr(callback, "hears_batches", True):
        return False
    if type(callback) is keras.callbacks.ProgbarLogger and callback.verbose != 1:
        return False  # it would count them; its list sets the number
    names = (event, _OLD_NAMES.get(event, event))
    return not all(is_default(getattr(callback, name, None)) for name in names)


class ResumableCallbacks(keras.callbacks.CallbackList):
    """Calls callbacks in Keras' way. A process that enters a call in its middle calls none for events that
    others have received to their end (see `Entry`). The exceptions are beginnings at which a callback has
    opened what can't be copied, such as a file.

    If no callback does anything at the end of a batch, nobody is called then: a call in Keras' way, by a
    thread, with the logs as Python's numbers, takes as long as the step of a small model.
    """

    batch_events: tuple[str, ...] = ("on_test_batch_begin", "on_test_batch_end")
    """The events of batches in the call."""

    def __init__(
        self,
        model: Any,
        state: LoopState,
        listener: CallListener,
        given: list[Any],
        own: list[Any],
        is_chief: bool,
        *,
        add_history: bool = False,
        **params: Any,
    ) -> None:
        """`given` are the callbacks that the script gives in every task, `own` those that this one runs."""
        self._state = state
        self._listener = listener
        #: Those that are still to write the model's graph.
        self._graphs = [c for c in own if isinstance(c, keras.callbacks.TensorBoard) and c.write_graph]
        #: Events of batches at which some callback does something. Written by `_find_batch_callbacks`.
        self._heard = frozenset(self.batch_events)
        super().__init__(
            own, add_history=add_history, add_progbar=params["verbose"] != 0, model=model, **params
        )
        #: Callbacks that may remember something of each batch. Written by `_find_batch_callbacks`.
        self._batch_callbacks: list[Any] = []
        #: Whether some of them may draw random numbers.
        self._has_users_batch_callbacks = False
        #: State that the callbacks remember.
        self.memory = CallbackMemory(given, self._history, is_chief)
        #: Sends all tasks what those of the chief do.
        self.chief_memory = ChiefMemory(self.memory)

    def set_model(self, model: Any) -> None:
        """Tell all callbacks of the model. Keras' TensorBoard writes a graph then, of which nobody knows yet:
        it does so in `_write_graphs`."""
        for callback in self._graphs:
            callback.write_graph = False
        super().set_model(model)
        for callback in self._graphs:
            callback.write_graph = True

    def _write_graphs(self, event: Key) -> None:
        """Have Keras' TensorBoard do what it left out in `set_model`."""
        if not self._graphs:
            return
        with self._calling(event):
            for callback in self._graphs:
                callback._write_keras_model_summary()
                callback._should_write_train_graph = True

    def _find_batch_callbacks(self) -> None:
        """Find out who does something at the events of batches, from now on."""
        self._heard = frozenset(e for e in self.batch_events if any(_hears(c, e) for c in self.callbacks))
        self._batch_callbacks = [
            callback
            for callback in self.callbacks
            if callback is not self._progbar
            and callback is not self._history
            and (any(_hears(callback, e) for e in self.batch_events) or _keeps_steps(callback))
        ]
        self._has_users_batch_callbacks = any(map(is_of_user, self._batch_callbacks))

    def share_memory(
        self, group: Group, position: LoopPosition, chief_rank: Callable[[Group], int | None]
    ) -> None:
        """Send all tasks what the chief's callbacks remember, if it may have changed. Collective."""
        if self._listener.can_be_replaced and self.chief_memory.is_due(position):
            self.chief_memory.share(group, chief_rank(group), position, self._batch_callbacks)

    def end_unit(self) -> None:
        """Forget what callbacks were like before the unit that was done."""
        self.chief_memory.end_unit()
        self.memory.release()

    # Who receives which event

    @contextlib.contextmanager
    def _calling(self, event: Key, callbacks: Sequence[Any] | None = None) -> Iterator[None]:
        """Call callbacks while open: what they find is remembered, so that they can be called again."""
        self._state.show_updates()
        ACCOUNT.enter(CALLBACKS)  # whatever came before: the script, or a meeting with other tasks
        if self._listener.can_be_replaced:
            self._state.gap.open(with_random=callbacks is None or self._has_users_batch_callbacks)
            self.memory.keep(callbacks)
        heard_before = self._listener.hear(self._state.position, event)
        repeats = heard_before or self._state.entry.repeats(event)
        with repeating_events() if repeats else contextlib.nullcontext():
            yield

    def _set_up(self, event: str, *args: Any, but: Sequence[Any] = ()) -> None:
        """Repeat a beginning for those callbacks that have something from there that can't be copied. Those
        of `but` have received it here."""
        ACCOUNT.enter(CALLBACKS)
        state = self._state
        with state.setting_up(), repeating_events():
            for callback in self.callbacks:
                if any(callback is one for one in but) or callback is self._progbar:
                    continue
                is_board = isinstance(callback, keras.callbacks.TensorBoard)
                if not is_board and self.memory.is_made_by(event, callback, state.memory_at_entry):
                    getattr(callback, event)(*args)
            self.memory.record_uncopied(event)
        self._set_up_by_hand(event, *args)

    def _set_up_by_hand(self, event: str, *args: Any) -> None:
        """Make what callbacks of Keras have from the beginning of something, without what else they do."""
        for callback in self.callbacks:
            if isinstance(callback, keras.callbacks.TensorBoard):
                if event == "on_train_begin":
                    callback._push_writer(callback._train_writer, callback._global_train_batch)
                elif event == "on_test_begin":
                    callback._push_writer(callback._val_writer, callback._global_test_batch)

    def _call_of_batch(self, name: str, event: Key, batch: int, logs: Any) -> None:
        """Call the method `name` of callbacks, unless none does anything, or all have received `event`."""
        if name in self._heard and not self._state.entry.was_heard(event):
            with self._calling(event, self._batch_callbacks):
                getattr(super(), name)(batch, logs)

    # Tests

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
            self.memory.record_uncopied("on_test_begin")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        event = key_of_test_batch_begin(self._state.position.epoch, batch)
        self._call_of_batch("on_test_batch_begin", event, batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        event = key_of_test_batch_end(self._state.position.epoch, batch)
        self._call_of_batch("on_test_batch_end", event, batch, logs)

    def on_test_end(self, logs: Any = None) -> None:
        event = key_of_test_end(self._state.position.epoch)
        if self._state.entry.was_heard(event):
            self._on_end()
            return
        with self._calling(event):
            super().on_test_end(logs)
