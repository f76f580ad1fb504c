"""Where a call is, and how another task or another run of the script takes it up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from insitu.train.elastic.position import EPOCH, TEST, TRAIN, LoopPosition
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.entry import key_of_batch_begin, key_of_batch_end
from insitu.train.fit.loop_state import LoopState, as_floats
from insitu.train.replica import views


class Books:
    """A bookkeeper that notes from where ledgers continue."""

    def __init__(self) -> None:
        self.restored: list[LoopPosition] = []

    def restore(self, position: LoopPosition) -> None:
        self.restored.append(position)


class Counting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0


class Fit:
    """The state of a fit of which nothing has been done, by a model that has been trained before."""

    def __init__(self) -> None:
        self.books: Any = Books()
        self.strategy: Any = SimpleNamespace(count_updates=lambda: None)
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile("sgd", "mse", metrics=["mae"])
        self.model.train_on_batch(np.ones((2, 2)), np.zeros((2, 1)))
        self.counting = Counting()
        self.loop = LoopState(self.model, self.books, LoopPosition(0, TRAIN, 1), self.strategy)
        self.memory = CallbackMemory([self.counting], keras.callbacks.History(), True)
        callbacks: Any = SimpleNamespace(memory=self.memory)
        self.loop.callbacks = callbacks


@pytest.fixture
def fit() -> Fit:
    return Fit()


def place(loop: LoopState) -> tuple[str, int, int, int]:
    position = loop.position
    return position.kind, position.epoch, position.step, position.test


def test_an_epoch_passes_through_steps_and_tests_to_the_next(fit: Fit) -> None:
    loop = fit.loop
    loop.begin_epoch(0)
    assert place(loop) == (TRAIN, 0, 0, 0)
    loop.position = loop.position.next_step()
    loop.begin_tests()
    assert place(loop) == (TEST, 0, 1, 0)
    loop.position = loop.position.at_test(1)
    loop.end_steps()
    assert place(loop) == (EPOCH, 0, 1, 1)
    loop.end_epoch()
    assert place(loop) == (TRAIN, 1, 0, 0)
    # As with fit(initial_epoch=4).
    loop.begin_epoch(4)
    assert (place(loop), loop.first_step) == ((TRAIN, 4, 0, 0), 0)


def test_a_replacement_skips_to_the_survivors_and_is_then_as_they_are(fit: Fit) -> None:
    fit.counting.count = 7
    fit.loop.logs, fit.loop.test_logs = {"loss": 0.5}, {"loss": 0.25}
    fit.loop.steps_since_check = 12
    fit.loop.metrics_before_tests = fit.loop.metrics()
    fit.model.stop_training = True
    state = fit.loop.state_dict()
    others = LoopPosition(0, TEST, 1, epoch=2, step=5, test=3)

    new = Fit()
    new.loop.stage(others, state, is_fit=True)
    new.loop.take_memory(new.memory)
    assert place(new.loop) == (TRAIN, 2, 5, 0)
    new.loop.begin_epoch(2)
    assert (new.loop.first_step, new.loop.first_test) == (5, 3)
    assert new.loop.skip_step() == {"loss": 0.5}
    assert not new.model.stop_training
    new.loop.end_skipped_steps()
    assert new.model.stop_training
    new.loop.begin_tests()
    assert new.loop.position == others
    assert new.loop.skip_test() == {"loss": 0.25}
    assert new.counting.count == 0
    new.loop.restore_callbacks()
    assert new.counting.count == 7
    new.loop.resume(state)
    assert new.loop.steps_since_check == 12
    assert new.loop.metrics_before_tests.keys() == new.loop.metrics().keys()
    assert new.books.restored == [others]
    # The next tests begin at their beginning.
    assert new.loop.first_test == 0


@pytest.mark.parametrize("others", [LoopPosition(0, TEST, 1, 2, 5, 0), LoopPosition(0, EPOCH, 1, 2, 5, 3)])
def test_a_replacement_in_the_tests_is_a_source_for_the_next_one(fit: Fit, others: LoopPosition) -> None:
    trained = fit.loop.metrics()
    assert any(float(np.sum(value)) for value in trained.values())
    fit.loop.metrics_before_tests = trained
    fit.model.reset_metrics()
    state = fit.loop.state_dict()

    new = Fit()
    new.loop.stage(others, state, is_fit=True)
    new.loop.begin_epoch(2)
    new.model.reset_metrics()
    new.loop.position = others
    new.loop.resume(state)
    sent = new.loop.state_dict()["metrics_before_tests"]
    for name, value in trained.items():
        np.testing.assert_array_equal(sent[name], value)


def test_an_epoch_entered_in_its_middle_has_the_metrics_of_its_first_steps(fit: Fit) -> None:
    state, metrics = fit.loop.state_dict(), fit.loop.metrics()
    assert any(float(np.sum(value)) for value in metrics.values())
    new = Fit()
    new.loop.stage(LoopPosition(0, TRAIN, 1, epoch=0, step=1), state, is_fit=True)
    new.model.reset_metrics()
    new.loop.begin_epoch(0)
    for name, value in new.loop.metrics().items():
        np.testing.assert_array_equal(value, metrics[name])


@pytest.mark.parametrize("step", [0, 3])
def test_callbacks_get_what_a_checkpoint_remembers_where_it_was_saved(fit: Fit, step: int) -> None:
    fit.counting.count = 5
    fit.loop.logs = {"loss": np.float32(0.5)}
    values = {name: np.array(value) for name, value in views(fit.loop.model_state).items()}
    extras = fit.loop.checkpoint_extras()
    assert extras["logs"] == {"loss": 0.5}

    new = Fit()
    new.loop.restore(1, step, values, extras)
    assert new.books.restored == [LoopPosition(0, TRAIN, 1, epoch=1, step=step)]
    new.loop.begin_epoch(1)
    assert new.loop.first_step == step
    assert new.counting.count == 0
    kernel = new.model.weights[0]
    with new.loop.setting_up():
        # As a callback may, where it opens a file.
        kernel.assign(kernel + 1)
        new.counting.count, new.model.stop_training = 9, True
        assert new.loop.sets_up
    assert (new.counting.count, new.model.stop_training, new.loop.sets_up) == (5, False, False)
    np.testing.assert_array_equal(kernel.numpy(), fit.model.weights[0].numpy())


def staged(survivor: Fit, others: LoopPosition) -> Fit:
    """A task that takes the place of another beside `survivor`, who is at `others`."""
    new = Fit()
    new.loop.stage(others, survivor.loop.state_dict(), is_fit=True)
    new.loop.take_memory(new.memory)
    return new


@pytest.mark.parametrize("step", [0, 5])
def test_training_stops_with_the_others_whatever_step_they_are_at(fit: Fit, step: int) -> None:
    """A callback may say so at the beginning of the fit, of an epoch or of a batch."""
    fit.model.stop_training = True
    others = LoopPosition(0, TRAIN, 1, 0, step)
    new = staged(fit, others)
    new.loop.begin_epoch(0)
    assert new.model.stop_training == (step == 0)
    new.loop.position = others
    # In the middle of an execution of several steps no batch has ended.
    new.loop.resume(fit.loop.state_dict())
    assert new.model.stop_training
    new.model.stop_training = False
    new.loop.end_skipped_steps()
    assert not new.model.stop_training, "taken over twice"


def test_what_callbacks_said_about_stopping_again_stays(fit: Fit) -> None:
    others = LoopPosition(0, TRAIN, 1, 0, 5)
    new = staged(fit, others)
    new.loop.begin_epoch(0)
    new.loop.end_skipped_steps()
    new.model.stop_training = True
    new.loop.resume(fit.loop.state_dict())
    assert new.model.stop_training


@pytest.mark.parametrize("kind", [TRAIN, TEST, EPOCH])
def test_the_step_of_a_checkpoint_was_done_by_nobody_here(fit: Fit, kind: str) -> None:
    """Its end isn't heard again, whether steps or tests come next."""
    values = {name: np.array(value) for name, value in views(fit.loop.model_state).items()}
    survivor = Fit()
    survivor.loop.restore(1, 3, values, fit.loop.checkpoint_extras())
    position = LoopPosition(0, TRAIN, 1, 1, 3)
    position = {TRAIN: position, TEST: position.at_test(0), EPOCH: position.at_epoch_end()}[kind]
    survivor.loop.position = position
    survivor.loop.has_begun_only = True
    new = staged(survivor, position)
    assert new.loop.entry.was_heard(key_of_batch_end(1, 2))
    assert not new.loop.entry.was_heard(key_of_batch_begin(1, 3))
    # It is a source itself then.
    assert new.loop.state_dict()["has_begun_only"]


def test_who_has_entered_sends_what_it_entered_by(fit: Fit) -> None:
    """Its callbacks were kept as it began, before they got that."""
    fit.counting.count = 7
    new = staged(fit, LoopPosition(0, TRAIN, 1, 0, 5))
    new.memory.keep()
    with new.loop.setting_up():
        new.counting.count = 1
    assert new.counting.count == 7
    new.memory.keep()
    new.counting.count = 8
    assert new.loop.state_dict()["callback_memory"]["own"]["Counting 0"]["count"] == 7


def test_an_ended_fit_lets_go_of_its_callbacks(fit: Fit) -> None:
    fit.loop.close()
    assert fit.loop.state_dict()["callback_memory"] == {}


def test_logs_become_numbers() -> None:
    assert as_floats({"loss": np.float32(0.5)}) == {"loss": 0.5}


def test_who_has_forgotten_how_far_it_came_counts_the_rest_of_the_epoch_as_heard(fit: Fit) -> None:
    fit.loop.start_at(2, 3)
    fit.loop.record_restored(is_forgotten=False)
    assert not fit.loop.entry.repeats(key_of_batch_begin(2, 3))
    fit.loop.record_restored(is_forgotten=True)
    assert fit.loop.entry.repeats(key_of_batch_end(2, 9))
    assert not fit.loop.entry.repeats(key_of_batch_begin(3, 0))
