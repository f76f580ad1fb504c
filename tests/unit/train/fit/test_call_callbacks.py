"""A task that takes up an `evaluate` or a `predict` has its callbacks as they were, and calls the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.context import context
from insitu.train.elastic.call_log import CallLog
from insitu.train.elastic.position import PREDICT, TEST, Kind, LoopPosition
from insitu.train.fit.call_callbacks import CallCallbacks
from insitu.train.fit.loop_state import LoopState
from insitu.train.fit.trainer import PredictionLoop, keeping_call, recall_call

STEPS = 5


class Heard(keras.callbacks.Callback):
    """Notes what it hears; ends the call as step `stop` begins."""

    def __init__(self, stop: int = -1) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.stop = stop

    def note(self, event: str, number: int = -1) -> None:
        self.events.append((event, number, random.random()))
        repeated.append((event, number, context().repeats_event))

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("begin")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note("batch", batch)
        self.model.stop_evaluating = self.model.stop_predicting = batch == self.stop

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch end", batch)

    def on_test_end(self, logs: Any = None) -> None:
        self.note("end")

    on_predict_begin, on_predict_end = on_test_begin, on_test_end
    on_predict_batch_begin, on_predict_batch_end = on_test_batch_begin, on_test_batch_end


repeated: list[Any] = []
"""What was heard in all processes, and whether they were told that it may be for the second time."""


class Killed(Exception):
    """Ends a process in a unit."""


class Process:
    """A process that makes one call of the script: it tests or predicts STEPS steps."""

    def __init__(self, kind: Kind, folder: Path, stop: int = -1) -> None:
        self.kind, self.last = kind, 10**9
        self.calls = CallLog()
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse", metrics=["mae"])
        self.model.train_on_batch(np.ones((2, 2)), np.zeros((2, 1)))
        self.heard = Heard(stop)
        strategy: Any = SimpleNamespace(show_updates=lambda: None)
        books: Any = None
        self.loop = LoopState(self.model, books, LoopPosition(0, kind, 1), strategy)
        self.units: list[LoopPosition] = []
        self.position = LoopPosition(0, kind, 1)

    can_be_replaced = True

    def meet(self, position: LoopPosition) -> None:
        self.do_unit(position)

    def record(self, heard: Any) -> None:
        """Nobody asks."""

    def name_uncopied(self, memory: Any) -> None:
        """Nobody asks."""

    def hear(self, position: LoopPosition, event: Any) -> bool:
        return False

    def do_unit(self, position: LoopPosition) -> None:
        if len(self.units) == self.last:
            self.position = position
            raise Killed
        self.units.append(position)
        self.loop.end_unit(position)
        assert self.loop.callbacks is not None
        self.loop.callbacks.end_unit()

    def run(self) -> None:
        listener: Any = self
        callbacks = CallCallbacks(self.model, self.loop, listener, [self.heard], True, verbose=0, steps=STEPS)
        with keeping_call(self.calls, self.loop, callbacks):
            (self._test if self.kind == TEST else self._predict)(callbacks)

    def _test(self, callbacks: CallCallbacks) -> None:
        """Do as Keras' `evaluate`."""
        self.loop.begin_tests()
        self.model.stop_evaluating = False
        callbacks.on_test_begin()
        first = self.loop.first_test
        for step in range(STEPS):
            callbacks.on_test_batch_begin(step)
            if step < first:
                self.loop.skip_test()
            else:
                self.do_unit(self.loop.position.at_test(step))
                self.loop.position = self.loop.position.at_test(step + 1)
                self.loop.test_logs = {"loss": float(step)}
            callbacks.on_test_batch_end(step, dict(self.loop.test_logs))
            if self.model.stop_evaluating:
                break
        callbacks.on_test_end()

    def _predict(self, callbacks: CallCallbacks) -> None:
        def read(start: int) -> Iterator[Any]:
            return iter(range(start, 0 if self.loop.entry.is_at_end else STEPS))

        def predict(index: int, batch: Any) -> Any:
            self.loop.position = self.loop.position.at_prediction(index)
            self.do_unit(self.loop.position)
            return np.array([float(batch)])

        result = PredictionLoop(self.model, callbacks, None).run(read, self.loop.outputs, predict)
        assert list(result) == list(range(len(self.loop.outputs)))


@pytest.mark.parametrize("kind", [TEST, PREDICT])
@pytest.mark.parametrize("stop", [-1, 2])
@pytest.mark.parametrize("last", [0, 2, 5])
def test_a_replacement_goes_on_with_the_callbacks_of_the_others(
    tmp_path: Path, kind: Kind, stop: int, last: int
) -> None:
    random.seed(3)
    undisturbed = Process(kind, tmp_path, stop)
    undisturbed.run()
    last = min(last, len(undisturbed.units) - 1)

    random.seed(3)
    survivor = Process(kind, tmp_path, stop)
    survivor.last = last
    loop, states = survivor.loop, []
    survivor.do_unit = lambda position, do=survivor.do_unit: (  # type: ignore[method-assign]
        states.append(loop.state_dict()) if len(survivor.units) == last else None,
        do(position),
    )
    with pytest.raises(Killed):
        survivor.run()

    random.seed(99)
    repeated.clear()
    replacement = Process(kind, tmp_path, stop)
    replacement.loop.stage(survivor.position, states[0])
    replacement.run()
    assert replacement.units == undisturbed.units[last:]
    assert replacement.heard.events == undisturbed.heard.events
    again = [event[:2] for event in repeated]
    assert again == [event[:2] for event in undisturbed.heard.events][-len(again) :]
    told = [event[2] for event in repeated]
    assert told[0] and told == sorted(told, reverse=True), "those between two units are heard again"


def test_a_finished_call_gives_back_what_its_callbacks_remember_and_random_states(tmp_path: Path) -> None:
    random.seed(3)
    done = Process(TEST, tmp_path)
    done.calls.run(done, lambda: done.run() or 7.0)  # type: ignore[arg-type, func-returns-value]
    following = random.random()

    random.seed(99)
    new = Process(TEST, tmp_path)
    log: Any = CallLog()
    log._results, log._memories = done.calls._results, done.calls._memories
    log._load = lambda trainer: None
    assert recall_call(log, None, [new.heard], True) == 7.0  # type: ignore[arg-type]
    assert new.heard.events == done.heard.events
    assert random.random() == following
