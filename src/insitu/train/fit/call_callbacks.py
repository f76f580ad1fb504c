"""Callbacks that a script gives to `evaluate` or `predict`: the events that they receive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from insitu.train.elastic import Membership
from insitu.train.fit.callback_list import CallListener, ResumableCallbacks, own_callbacks
from insitu.train.fit.entry import (
    Key,
    key_of_batch_begin,
    key_of_batch_end,
    key_of_epoch_begin,
    key_of_epoch_end,
    key_of_test_begin,
)
from insitu.train.fit.loop_state import LoopState
from insitu.train.fit.meetings import Meetings
from insitu.train.fit.writer_files import begins_files

_PREDICT_BEGIN, _PREDICT_END = key_of_epoch_begin(0), key_of_epoch_end(0)
"""The steps of a prediction are those of one epoch."""


def make_callbacks(
    membership: Membership, model: Any, loop: LoopState, given: list[Any], verbose: Any, steps: int | None
) -> CallCallbacks:
    """Return the list of the callbacks that a call of `evaluate` or `predict` gives."""
    is_nested = loop.position.depth > 1
    meetings = Meetings(membership, f"call-{loop.position.call}", is_nested=is_nested)
    verbose, is_chief = membership.verbosity(verbose), membership.context.is_chief
    return CallCallbacks(model, loop, meetings, given, is_chief, verbose=verbose, steps=steps)


class CallCallbacks(ResumableCallbacks):
    """Calls the callbacks of an `evaluate` or a `predict`, from where this process enters it."""

    batch_events = (
        *ResumableCallbacks.batch_events,
        "on_predict_batch_begin",
        "on_predict_batch_end",
    )

    def __init__(
        self,
        model: Any,
        state: LoopState,
        listener: CallListener,
        given: list[Any],
        is_chief: bool,
        *,
        verbose: Any,
        steps: int | None,
    ) -> None:
        own = own_callbacks(given, is_chief)
        super().__init__(model, state, listener, given, own, is_chief, verbose=verbose, epochs=1, steps=steps)

    @contextlib.contextmanager
    def _entering(self, event: Key) -> Iterator[None]:
        """Enter the call at the position, while open. `event` is the call's beginning."""
        state, writes = self._state, any(map(begins_files, self.callbacks))
        self._listener.name_uncopied(self.memory)
        if state.entry.was_heard(event):
            self.memory.warn_of_uncopied(state.memory_at_entry)
            writers = self._listener.take_over_files() if writes else []
            with self.memory.continuing_files(state.memory_at_entry, writers):
                yield
        else:
            state.restore_callbacks()
            if writes:
                self._listener.begin_files(self.callbacks)
            self._write_graphs(event)
            yield
        # Now, since a callback may have made its methods at the beginning.
        self._find_batch_callbacks()

    def _set_up_by_hand(self, event: str, *args: Any) -> None:
        if self._progbar is not None:
            getattr(self._progbar, event)(*args)
        super()._set_up_by_hand(event, *args)

    def _end(self, steps: int) -> None:
        """Come to the end of the call, before callbacks receive it."""
        if self._progbar is not None:
            self._progbar.seen = steps

    def _meet(self) -> None:
        """Wait for all tasks: their callbacks have received the end."""
        self._listener.meet(self._state.position.at_end())

    # Tests

    def on_test_begin(self, logs: Any = None) -> None:
        with self._entering(key_of_test_begin(0)):
            super().on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._end(self._state.position.test)
        super().on_test_end(logs)
        self._meet()

    # Predictions

    def on_predict_begin(self, logs: Any = None) -> None:
        with self._entering(_PREDICT_BEGIN):
            if self._state.entry.was_heard(_PREDICT_BEGIN):
                self._on_begin()
                self._set_up("on_predict_begin", logs)
                return
            with self._calling(_PREDICT_BEGIN):
                super().on_predict_begin(logs)
                self.memory.record_uncopied("on_predict_begin")

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._call_of_batch("on_predict_batch_begin", key_of_batch_begin(0, batch), batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._call_of_batch("on_predict_batch_end", key_of_batch_end(0, batch), batch, logs)

    def on_predict_end(self, logs: Any = None) -> None:
        state = self._state
        state.position = state.position.at_prediction(len(state.outputs))
        self._end(len(state.outputs))
        with self._calling(_PREDICT_END):
            super().on_predict_end(logs)
        self._meet()
