"""The calls of a script, as a replacement repeats them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import image_model, same_bits

from insitu.base.errors import TrainingError
from insitu.train.elastic import call_log
from insitu.train.elastic.call_log import CallLog
from insitu.train.elastic.lockstep import ResumePoint
from insitu.train.elastic.position import EPOCH, SETUP, TEST, TRAIN, LoopPosition
from insitu.train.replica import ModelState, read_state, to_numpy, views


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

    def end_unit(self, position: LoopPosition) -> None:
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


def nested_in(survivor: Trainer, *calls: Any) -> Any:
    """The state of a task whose callback has made `calls` since the last unit."""
    states: list[Any] = []

    def during() -> None:
        for call in calls:
            call()
        states.append(survivor.calls.state_dict())

    survivor.run(during=during)
    return states[0]


def entering(state: Any, during: Any) -> Trainer:
    replacement = Trainer(CallLog(), small_model())
    replacement.calls.stage(state)
    replacement.run(during=lambda: during(replacement))
    return replacement


def with_metrics() -> Any:
    model = small_model()
    model.compile("sgd", "mse", metrics=["mae"])
    model.evaluate(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    return model


def test_calls_of_callbacks_return_what_they_returned_to_the_others(survivor: Trainer) -> None:
    survivor.model = with_metrics()
    answer = np.ones(3)
    state = nested_in(survivor, lambda: survivor.run([0.5, 1.0]), lambda: survivor.run(answer))
    answer[:] = 7  # a callback may change what it got
    found: list[Any] = []

    def callback(replacement: Trainer) -> None:
        replacement.model = with_metrics()
        replacement.model.reset_metrics()
        for _ in range(2):
            # It isn't made.
            found.append(replacement.run("other", during=lambda: found.append("made")))
        found.append(replacement.calls.state_dict()["nested"])

    replacement = entering(state, callback)
    first, second, nested = found
    assert (first, second.tolist(), len(nested)) == ([0.5, 1.0], [1.0, 1.0, 1.0], 2)
    left = [to_numpy(v) for v in replacement.state.sums]
    assert same_bits(left, [to_numpy(v) for v in survivor.state.sums]) and any(map(np.any, left))


def test_a_unit_ends_what_can_be_recalled(survivor: Trainer) -> None:
    unit = LoopPosition(0, TRAIN, 1)

    def do(position: LoopPosition) -> None:
        survivor.calls.begin_unit(None, position)  # type: ignore[arg-type]
        survivor.calls.end_unit(position)

    state = nested_in(
        survivor,
        lambda: survivor.run("first"),
        lambda: do(unit),
        lambda: survivor.run("second", during=lambda: do(LoopPosition(0, TEST, 2))),
        lambda: do(LoopPosition(0, SETUP, 1)),
    )
    assert [one["result"] for one in state["nested"]] == ["second"]
    assert survivor.units == ["begin train", "end"]


@pytest.mark.parametrize("wrong", ["another model", "one too many", "where something is opened"])
def test_other_calls_of_callbacks_than_before_are_refused(survivor: Trainer, wrong: str) -> None:
    state = nested_in(survivor, lambda: survivor.run(1.0))

    def callback(replacement: Trainer) -> None:
        if wrong == "another model":
            Trainer(replacement.calls, small_model()).run()
        replacement.sets_up = wrong == "where something is opened"
        replacement.run()
        if wrong == "one too many":
            replacement.run()

    with pytest.raises(TrainingError, match="A callback makes the same calls each time"):
        entering(state, callback)


def test_behind_the_entry_callbacks_make_their_calls(survivor: Trainer) -> None:
    state = nested_in(survivor, lambda: survivor.run(1.0))
    made: list[Any] = []

    def callback(replacement: Trainer) -> None:
        replacement.calls.resume(LoopPosition(0, TRAIN, 1))
        made.append(replacement.run(2.0, during=lambda: made.append("made")))

    entering(state, callback)
    assert made == ["made", 2.0]


def test_no_task_can_be_replaced_behind_a_fit_of_a_callback(survivor: Trainer) -> None:
    history = keras.callbacks.History()
    state = nested_in(survivor, lambda: survivor.run(history))
    assert state["nested"] == [] and not survivor.calls.complete


def test_a_model_that_is_entered_keeps_what_callbacks_have_made_of_it(survivor: Trainer) -> None:
    state = nested_in(survivor)

    def callback(replacement: Trainer) -> None:
        replacement.replays = True
        point = ResumePoint(9, LoopPosition(0, TRAIN, 1, 0, 4))
        assert replacement.calls.staged_call(point) is not None
        assert same_bits(replacement.model.get_weights(), survivor.model.get_weights())
        replacement.model.set_weights([np.full((2, 1), 3.0), np.ones(1)])
        replacement.calls.resume(point.position)

    assert entering(state, callback).model.get_weights()[0].tolist() == [[3.0], [3.0]]
