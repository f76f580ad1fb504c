"""The calls of a script, as a replacement repeats them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import image_model

from insitu.errors import TrainingError
from insitu.train.elastic import call_log
from insitu.train.elastic.call_log import CallLog
from insitu.train.elastic.lockstep import ResumePoint
from insitu.train.elastic.position import EPOCH, SETUP, TEST, TRAIN, LoopPosition
from insitu.train.replica import ModelState, read_state, views


class Trainer:
    """A model whose calls return what they are to return."""

    def __init__(self, calls: CallLog, model: Any) -> None:
        self.model = model
        self.calls = calls
        self.number = calls.register(self)
        self.prepared = True
        self.replays = self.sets_up = False
        self.position = calls.position(TRAIN)
        self.resumed: list[Any] = []
        self.units: list[str] = []

    @property
    def state(self) -> ModelState:
        return read_state(self.model)

    def views(self) -> dict[str, Any]:
        return views(self.state)

    def begin_unit(self, group: Any, position: LoopPosition) -> None:
        self.units.append(f"begin {position.kind}")

    def end_unit(self) -> None:
        self.units.append("end")

    def state_dict(self) -> dict[str, Any]:
        return {"logs": {"loss": 0.5}}

    def resume(self, state: dict[str, Any]) -> None:
        self.resumed.append(state)

    def run(self, result: Any = None, during: Any = lambda: None) -> Any:
        def call() -> Any:
            during()
            return result

        return self.calls.run(self, call)


def small_model() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.fixture
def survivor() -> Trainer:
    """A task that has made one call and is in the middle of its second."""
    return Trainer(CallLog(), small_model())


def staged(survivor: Trainer, point: LoopPosition) -> tuple[Trainer, ResumePoint]:
    """A replacement that has been sent the state of `survivor` in a call at `point`."""
    replacement = Trainer(CallLog(), small_model())
    states: list[Any] = []
    survivor.run(during=lambda: states.append(survivor.calls.state_dict()))
    replacement.calls.stage(states[0])
    return replacement, ResumePoint(9, point)


def test_positions_count_calls_and_their_depth() -> None:
    trainer = Trainer(CallLog(), small_model())
    calls, seen = trainer.calls, []

    def nested() -> None:
        seen.append(calls.position(TEST))

    def outer() -> None:
        seen.append(calls.position(TRAIN))
        trainer.run(during=nested)

    seen.append(calls.position(SETUP))
    trainer.run(during=outer)
    seen.append(calls.position(SETUP))
    assert [(p.call, p.kind, p.depth) for p in seen] == [
        (0, SETUP, 0),
        (0, TRAIN, 1),
        (0, TEST, 2),
        (1, SETUP, 0),
    ]
    assert not calls.is_under_way


def test_a_call_that_fails_is_not_counted() -> None:
    trainer = Trainer(CallLog(), small_model())

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer.run(during=fail)
    assert trainer.calls.position(TRAIN) == LoopPosition(0, TRAIN)


def test_a_finished_call_returns_what_it_returned_to_the_others(survivor: Trainer) -> None:
    survivor.run([0.25, 1.0])
    survivor.model.set_weights([np.full((2, 1), 3.0), np.ones(1)])
    replacement, point = staged(survivor, LoopPosition(1, TRAIN, 1, 0, 4))
    found = []

    def during() -> None:
        assert replacement.calls.is_finished(point)
        assert replacement.calls.staged_call(point) is None
        found.append(replacement.calls.recall(replacement))

    replacement.run(during=during)
    assert found == [[0.25, 1.0]]
    assert replacement.model.get_weights()[0].tolist() == [[3.0], [3.0]]


def test_a_call_before_the_others_compiled_the_model_again_takes_the_weights_that_it_has(
    survivor: Trainer,
) -> None:
    survivor.run([0.25, 1.0])
    survivor.model.set_weights([np.full((2, 1), 3.0), np.ones(1)])
    survivor.model.compile(keras.optimizers.Adam(), "mse")
    survivor.model.optimizer.build(survivor.model.trainable_variables)
    replacement, _ = staged(survivor, LoopPosition(1, TRAIN, 1, 0, 4))
    replacement.run(during=lambda: replacement.calls.recall(replacement))
    assert replacement.model.get_weights()[0].tolist() == [[3.0], [3.0]]


def test_a_history_is_recalled_with_what_callbacks_remember(survivor: Trainer) -> None:
    history = keras.callbacks.History()
    history.set_params({"epochs": 2})
    history.history, history.epoch = {"loss": [1.0, 0.5]}, [0, 1]
    survivor.run(history, lambda: survivor.calls.record_memory({"Counting 0": {"count": 2}}))
    replacement, _ = staged(survivor, LoopPosition(1, TRAIN, 1))
    replacement.run(during=lambda: found.append(replacement.calls.recall(replacement)), result=(found := []))
    assert (found[0].history, found[0].epoch) == ({"loss": [1.0, 0.5]}, [0, 1])
    assert replacement.model.history is found[0]
    assert survivor.calls.state_dict()["memories"] == {0: {"Counting 0": {"count": 2}}}


def test_a_call_is_entered_in_its_middle(survivor: Trainer) -> None:
    survivor.run("first")
    replacement, point = staged(survivor, LoopPosition(1, EPOCH, 1, 2, 5))
    replacement.run("first")

    def during() -> None:
        assert not replacement.calls.is_finished(point)
        assert replacement.calls.staged_call(point) == (point.position, {"logs": {"loss": 0.5}})
        replacement.calls.resume(point.position)

    replacement.run(during=during)
    assert replacement.resumed == [{"logs": {"loss": 0.5}}]
    for mine, theirs in zip(replacement.model.get_weights(), survivor.model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_before_the_first_weights_there_is_no_middle_to_enter(survivor: Trainer) -> None:
    replacement, point = staged(survivor, LoopPosition(0, SETUP, 1))

    def during() -> None:
        assert replacement.calls.staged_call(point) is None
        replacement.calls.resume(point.position)

    replacement.run(during=during)
    assert replacement.resumed == []


def test_nothing_can_be_entered_outside_of_calls(survivor: Trainer) -> None:
    replacement, point = staged(survivor, LoopPosition(0, TRAIN, 1))
    with pytest.raises(TrainingError, match="in the middle of 'train'"):
        replacement.calls.resume(point.position)


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "KEPT_BYTES", 100)
    trainer = Trainer(CallLog(), small_model())
    trainer.run(np.zeros(10), lambda: trainer.calls.record_memory({"Large 0": {"array": np.zeros(100)}}))
    assert trainer.calls.complete
    trainer.run(np.zeros(10))
    assert not trainer.calls.complete
    assert list(trainer.calls.state_dict()["results"]) == [0]
    assert trainer.calls.state_dict()["memories"] == {}


def test_a_result_that_is_no_plain_value_is_not_kept() -> None:
    trainer = Trainer(CallLog(), small_model())
    trainer.run(object())
    assert not trainer.calls.complete


def test_a_fingerprint_is_of_the_variables_and_of_the_position() -> None:
    trainer = Trainer(CallLog(), image_model())
    trainer.model.optimizer.build(trainer.model.trainable_variables)
    found: list[Any] = []
    for step in (0, 1):
        trainer.position = LoopPosition(0, TRAIN, 1, 0, step)
        trainer.run(during=lambda: found.append(trainer.calls.fingerprint()))
    assert found[0].summary.tolist() != found[1].summary.tolist()
    assert found[0].hashes[:-1].tolist() == found[1].hashes[:-1].tolist()
    assert trainer.calls.fingerprint().position == ()
