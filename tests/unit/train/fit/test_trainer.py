"""Calls of a model under a strategy: which positions they pass through, and what they report of them."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards, same_bits, weights

import insitu
from insitu.base.errors import TrainingError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy
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


# One replica outside a job: calls that are left to Keras


def alone(strategy: Any = None, **options: Any) -> KerasTrainer:
    with (strategy or OneDeviceStrategy()).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", **options)
    made = trainer_of(model)
    assert made is not None
    return made


def test_keras_does_what_needs_nothing_of_insitu(tmp_path: Path) -> None:
    trainer = alone()
    model = trainer.model
    model.fit(((X, Y) for _ in range(4)), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0)
    of_keras = model.train_function
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    model.train_on_batch(X, Y)
    assert (trainer.executors, trainer.does_steps) == ((), False)
    assert (trainer.fit_index, model.train_function) == (0, of_keras)

    class Nested(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            assert trainer.does_steps
            self.model.evaluate(X, Y, verbose=0)
            self.model.train_on_batch(X, Y)
            assert trainer.does_steps

    before = weights(model)
    model.fit(
        X, Y, verbose=0, callbacks=[insitu.BackupAndRestore(tmp_path), Nested()], validation_data=(X, Y)
    )
    assert not same_bits(weights(model), before)
    assert (len(trainer.executors), trainer.does_steps, trainer.fit_index) == (1, False, 1)
    assert model.train_function is of_keras


def test_rows_of_a_cache_are_insitus_in_any_place(two_rows: Any) -> None:
    trainer = alone()
    model = trainer.model
    for call in (
        lambda: model.evaluate(two_rows, verbose=0),
        lambda: model.fit(X, Y, validation_data=two_rows, verbose=0),
        lambda: model.fit(X, Y, validation_data=(two_rows,), verbose=0),
        lambda: model.fit(two_rows, verbose=0),
        lambda: model.fit(x=two_rows, verbose=0, callbacks=[]),
    ):
        trainer._executors.forget()
        call()
        assert trainer.executors
        assert (model.train_function, model.test_function) == (None, None)


@pytest.fixture
def two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "home"))
    np.savez(tmp_path / "rows.npz", x=X[:2], y=Y[:2])
    import_cache(Paths(tmp_path / "home"), "two", [str(tmp_path / "rows.npz")], partitions=1)
    return insitu.dataset("two", features="x", label="y").batch(1)


def test_in_a_job_and_over_shards_nothing_is_left_to_keras() -> None:
    here = in_shards((0,), 1)
    assert alone(MultiWorkerMirroredStrategy(context=here)).strategy.delegates_to_keras
    for context in (dataclasses.replace(here, job_id="a-job"), in_shards((0, 1), 2)):
        trainer = alone(MultiWorkerMirroredStrategy(context=context))
        assert (trainer.strategy.delegates_to_keras, trainer.does_steps) == (False, True)


def test_a_fit_that_is_left_to_keras_is_refused_in_another_scope() -> None:
    model = alone().model
    with (
        MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope(),
        pytest.raises(TrainingError, match="in another strategy's scope"),
    ):
        model.fit(X, Y, verbose=0)


# Compiling again


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_is_compiled_again_trains_as_it_is_compiled(inside: bool) -> None:
    def run(strategy: Any) -> Any:
        keras.utils.set_random_seed(7)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.layers.Dense(3, trainable=False), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,)), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        options = {"batch_size": 3, "shuffle": False, "verbose": 0, "validation_data": (X, Y)}
        first = model.fit(X, Y, **options).history
        layers[0].trainable = True
        with strategy.scope() if strategy and inside else contextlib.nullcontext():
            model.compile(keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
        second = model.fit(X, Y, epochs=2, **options).history
        return first, second, weights(model), int(model.optimizer.iterations)

    plain, mine = run(None), run(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)))
    for name in ("loss", "mae", "val_loss"):
        np.testing.assert_allclose(mine[0][name], plain[0][name], rtol=1e-5)
    assert mine[1].keys() == plain[1].keys()
    for name, values in plain[1].items():
        np.testing.assert_allclose(mine[1][name], values, rtol=1e-5)
    for one, other in zip(mine[2], plain[2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert mine[3] == plain[3] == 4


def test_a_model_keeps_its_trainer_when_it_is_compiled_again() -> None:
    strategy = MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2))
    trainer = alone(strategy)
    fit(trainer)
    trainer.model.compile("adam", "mae")
    assert (trainer_of(trainer.model), trainer.executors) == (trainer, ())
    with strategy.scope():
        trainer.model.compile("adam", "mae")
    assert trainer_of(trainer.model) is trainer


def test_what_the_user_has_put_in_place_of_a_step_is_refused() -> None:
    class Own(keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            return super().make_train_function(force)

    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = Own([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match=r"Own\.make_train_function, overridden"):
        model.fit(X, Y, verbose=0)
    with pytest.raises(TrainingError, match=r"Own\.make_train_function, overridden"):
        model.train_on_batch(X, Y)
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


# Single batches


def test_single_batches_are_those_of_keras() -> None:
    def run(strategy: Any) -> Any:
        keras.utils.set_random_seed(7)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        y = np.array([0, 1, 2, 1, 0, 1])
        return [
            model.train_on_batch(X, y),
            model.train_on_batch(X[:5], y[:5], sample_weight=np.arange(5.0), return_dict=True),
            model.train_on_batch(X, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, return_dict=True),
            model.test_on_batch(X[:3], y[:3]),
            model.test_on_batch(X, y, sample_weight=np.arange(6.0), return_dict=True),
            model.predict_on_batch(X[:1]),
            *weights(model),
        ]

    plain, mine = run(None), run(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)))
    for one, other in zip(mine, plain, strict=True):
        assert type(one) is type(other)
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            one, other = list(one.values()), list(other.values())
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_keras_builds_a_model_where_a_script_asks_for_it(trainer: KerasTrainer) -> None:
    model = trainer.model
    model.compile("sgd", "mse", metrics=["mae"])
    model._symbolic_build(data_batch=(X, Y))
    assert model._compile_loss.built and model._compile_metrics.built
    model.train_on_batch(X, Y)
    assert trainer.prepared
