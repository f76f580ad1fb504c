"""Calls of a model under a strategy: which positions they pass through, and what they report of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards, same_bits, weights

from insitu.errors import TrainingError
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.elastic.lockstep import RetryStep
from insitu.train.elastic.position import EPOCH, PREDICT, TEST, TRAIN, LoopPosition
from insitu.train.fit.trainer import KerasTrainer, trainer_of

X, Y = np.ones((6, 2), "float32"), np.zeros((6, 1), "float32")


def make_trainer() -> KerasTrainer:
    keras.utils.set_random_seed(7)
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    made = trainer_of(model)
    assert made is not None
    return made


@pytest.fixture
def trainer() -> KerasTrainer:
    return make_trainer()


class Units:
    """Notes the positions of all units, and interrupts those of `interrupted` once."""

    def __init__(self, trainer: KerasTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[LoopPosition] = []
        self.interrupted: list[LoopPosition] = []
        self.at_interruption: Any = lambda: None
        lockstep = trainer.membership.lockstep
        run_unit = lockstep.run_unit

        def noted(position: LoopPosition, work: Any) -> Any:
            self.done.append(position)
            if position in self.interrupted:
                self.interrupted.remove(position)
                self.at_interruption()
                raise RetryStep
            return run_unit(position, work)

        monkeypatch.setattr(lockstep, "run_unit", noted)


@pytest.fixture
def units(trainer: KerasTrainer, monkeypatch: pytest.MonkeyPatch) -> Units:
    return Units(trainer, monkeypatch)


def fit(trainer: KerasTrainer, **options: Any) -> Any:
    defaults = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X, Y)}
    return trainer.model.fit(X, Y, **{**defaults, **options})


def test_a_fit_passes_through_steps_and_tests_of_each_epoch(trainer: KerasTrainer, units: Units) -> None:
    fit(trainer)
    assert units.done[0].is_setup
    assert units.done[1:] == [
        unit
        for epoch in range(2)
        for unit in (
            LoopPosition(0, TRAIN, 1, epoch, 0),
            LoopPosition(0, TRAIN, 1, epoch, 1),
            LoopPosition(0, TEST, 1, epoch, 2, 0),
            LoopPosition(0, TEST, 1, epoch, 2, 1),
        )
    ]


def test_calls_have_numbers(trainer: KerasTrainer, units: Units) -> None:
    fit(trainer, epochs=1, validation_data=None)
    trainer.model.evaluate(X, Y, batch_size=6, verbose=0)
    trainer.model.predict(X, batch_size=3, verbose=0)
    assert units.done[-3:] == [
        LoopPosition(1, TEST, 1),
        LoopPosition(2, PREDICT, 1, 0, 0),
        LoopPosition(2, PREDICT, 1, 0, 1),
    ]


def test_a_call_in_the_middle_of_a_fit_leaves_its_position_alone(trainer: KerasTrainer, units: Units) -> None:
    class Nested(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            trainer.model.evaluate(X, Y, batch_size=6, verbose=0)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert trainer.position == LoopPosition(0, EPOCH, 1, epoch, 2)

    fit(trainer, validation_data=None, callbacks=[Nested()])
    nested = LoopPosition(0, TEST, 2)
    assert units.done[1:] == [
        unit for e in range(2) for s in range(2) for unit in (LoopPosition(0, TRAIN, 1, e, s), nested)
    ]


def results(trainer: KerasTrainer) -> list[Any]:
    history = fit(trainer).history
    return [history, trainer.model.predict(X, batch_size=3, verbose=0).tolist(), weights(trainer.model)]


def test_a_step_that_is_interrupted_is_done_again(
    trainer: KerasTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(make_trainer())
    units = Units(trainer, monkeypatch)
    interrupted = [
        LoopPosition(0, TRAIN, 1, 0, 1),
        LoopPosition(0, TEST, 1, 1, 2, 1),
        LoopPosition(1, PREDICT, 1, 0, 1),
    ]
    units.interrupted = list(interrupted)
    found = results(trainer)
    assert found[:2] == expected[:2]
    assert same_bits(found[2], expected[2])
    assert units.interrupted == [], "an injection has not fired"
    assert [units.done.count(position) for position in interrupted] == [2, 2, 2]


def test_an_interrupted_step_is_read_again_for_the_shards_of_now(
    trainer: KerasTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a task that has lost a shard gets it back: what it trains on in the end is the same."""
    expected = results(make_trainer())
    units = Units(trainer, monkeypatch)
    rendezvous, restored = trainer.membership._rendezvous, []
    both = rendezvous.context
    monkeypatch.setattr(trainer.bookkeeper, "restore", restored.append)

    def give_back() -> None:
        rendezvous.context = both

    def lose(batch: int, logs: Any = None) -> None:
        if batch == 1 and not restored:
            rendezvous.context = dataclasses.replace(both, shards=(0,))

    position = LoopPosition(0, TRAIN, 1, 0, 1)
    units.interrupted, units.at_interruption = [position], give_back
    found = fit(trainer, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=lose)]).history
    assert found == expected[0]
    assert restored == [position, position]


def test_single_batches_go_on_counting_where_a_fit_ended(trainer: KerasTrainer, units: Units) -> None:
    fit(trainer)
    trainer.model.train_on_batch(X, Y)
    trainer.model.test_on_batch(X, Y)
    trainer.model.train_on_batch(X, Y)
    assert [(p.kind, p.epoch, p.step) for p in units.done[-3:]] == [
        (TRAIN, 2, 0),
        (TEST, 2, 1),
        (TRAIN, 2, 1),
    ]
    assert not trainer.membership.reporter.elastic


def test_reports_name_the_position(trainer: KerasTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Any] = []
    reporter = trainer.membership.reporter
    report = reporter.report

    def noted(position: LoopPosition, place: str) -> None:
        reports.append((position.epoch, position.step, place))
        report(position, place)

    monkeypatch.setattr(reporter, "report", noted)
    fit(trainer, epochs=1)
    steps = [(0, step, place) for step in range(2) for place in ("gradient", "exchange", "update")]
    assert reports == [*steps, (0, 2, "evaluation"), (0, 2, "evaluation")]


def test_a_compiled_function_on_its_own_is_refused(trainer: KerasTrainer) -> None:
    with pytest.raises(TrainingError, match="prepare the step"):
        trainer._train(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_validation_takes_the_first_steps_in_each_epoch_as_keras_does(steps: int):
    x, y = np.arange(6, dtype="float32")[:, None], np.zeros((6, 1), "float32")

    def validate(model: keras.Model) -> list[float]:
        options: dict[str, Any] = {"validation_batch_size": 2, "validation_steps": steps}
        history = model.fit(x, y, epochs=3, validation_data=(x, y), verbose=0, **options)
        return [*history.history["val_loss"], model.evaluate(x, y, batch_size=2, steps=steps, verbose=0)]

    def make_model() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = make_model()
    assert validate(model) == pytest.approx(validate(make_model()), rel=1e-6)
