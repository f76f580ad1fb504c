"""Weights that a script sets on a worker reach the servers between fits, and are refused during one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards, same_bits, weights

from insitu.base.errors import TrainingError
from insitu.train import MultiWorkerMirroredStrategy, ParameterServerStrategy
from insitu.train.fit.trainer import trainer_of
from insitu.train.parameter_server.step import WeightsWatch
from insitu.train.replica import Span

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
LABELS = ROWS @ np.array([[2.0], [-1.0]], "float32")


MADE: list[ParameterServerStrategy] = []


@pytest.fixture(autouse=True)
def sessions_closed() -> Iterator[None]:
    yield
    for strategy in MADE:
        if strategy._session is not None:
            strategy._session.close()
    MADE.clear()


def over(num_shards: int = 1, **options: Any) -> ParameterServerStrategy:
    MADE.append(ParameterServerStrategy(context=in_shards(tuple(range(num_shards)), num_shards), **options))
    return MADE[-1]


def linear_model(strategy: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def fit(model: Any, *callbacks: Any, weighted: bool = False) -> None:
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    options["sample_weight"] = np.ones(16, "float32") if weighted else None
    model.fit(ROWS, LABELS, callbacks=list(callbacks), **options)


def test_only_other_values_count_as_changed() -> None:
    variable = keras.Variable(np.ones(3, "float32"), name="w")
    replica: Any = SimpleNamespace(
        float_spans=lambda: [(variable, Span(0, 3, (3,)))], watch_weights=lambda variables: False
    )
    watch, pulled = WeightsWatch(replica), np.ones(3, "float32")
    assert watch.find_changed(pulled) == []
    watch.note()
    assert watch.find_changed(pulled) == []
    variable.assign(np.ones(3, "float32"))
    assert watch.find_changed(pulled) == []
    variable.assign([1.0, 2.0, 3.0])
    assert watch.find_changed(pulled) == [variable]


def test_a_gradient_brings_the_values_that_are_compared() -> None:
    variables = [keras.Variable(np.ones(size, "float32"), name=f"w{size}") for size in (3, 5000)]
    spans = [(variables[0], Span(0, 3, (3,))), (variables[1], Span(3, 5003, (5000,)))]
    taken: list[Any] = []
    replica: Any = SimpleNamespace(
        float_spans=lambda: spans, watch_weights=lambda watched: len(watched) == 3, take_watched=lambda: taken
    )
    pulled = np.ones(5003, "float32")
    watch = WeightsWatch(replica, rate=keras.Variable(0.5))
    # Those of the gradient count, also where it was pulled to where they are.
    taken[:] = [np.ones(3, "float32"), pulled[3:], np.float32(0.25)]
    assert watch.find_changed_in_step(pulled) == []
    assert watch.learning_rate == 0.25
    for index, (variable, own) in enumerate(zip(variables, taken[:2], strict=True)):
        changed = own.copy()
        changed[-1] = 2
        others = list(taken)
        taken[index] = changed
        assert watch.find_changed_in_step(pulled) == [variable]
        taken[:] = others
    # Without a gradient since, the variables themselves are read.
    taken.clear()
    variables[0].assign(np.zeros(3, "float32"))
    assert watch.find_changed_in_step(pulled) == [variables[0]]
    assert watch.learning_rate is None


@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
@pytest.mark.parametrize("weighted", [False, True], ids=["same step", "another step"])
def test_weights_that_are_set_between_fits_are_trained_on(mode: Any, weighted: bool) -> None:
    trained = []
    for strategy in (MultiWorkerMirroredStrategy(context=in_shards((0,), 1)), over(mode=mode)):
        model = linear_model(strategy)
        fit(model)
        model.set_weights([np.full((2, 1), 5.0, "float32"), np.zeros(1, "float32")])
        fit(model, weighted=weighted)
        trained.append(weights(model))
    for own, expected in zip(*trained, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5)
    assert mode != "sync" or same_bits(*trained)


def test_loaded_weights_are_trained_on(tmp_path: Any) -> None:
    model = linear_model(over())
    fit(model)
    model.save_weights(tmp_path / "first.weights.h5")
    first = model.get_weights()
    fit(model)
    assert not same_bits(first, model.get_weights())
    model.load_weights(tmp_path / "first.weights.h5")
    begun: list[Any] = []
    fit(model, keras.callbacks.LambdaCallback(on_train_begin=lambda logs: begun.extend(model.get_weights())))
    assert same_bits(begun, first)
    session = model_session(model)
    assert same_bits([session.pull()], [np.concatenate([w.reshape(-1) for w in model.get_weights()])])


def model_session(model: Any) -> Any:
    return trainer_of(model).strategy._open_session()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_weights([w + 1 for w in model.get_weights()]),
        lambda model: model.layers[0].kernel.assign(np.zeros((2, 1), "float32")),
    ],
)
def test_weights_that_a_callback_sets_during_a_fit_are_refused(change: Callable[[Any], None]) -> None:
    model = linear_model(over())
    setter = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: change(model))
    with pytest.raises(TrainingError, match=r"another value of sequential.*/kernel, set between two steps"):
        fit(model, setter)


def test_what_a_callback_sets_when_a_fit_ends_is_where_the_next_begins() -> None:
    model = linear_model(over())
    zeros = [np.zeros((2, 1), "float32"), np.zeros(1, "float32")]
    fit(model, keras.callbacks.LambdaCallback(on_train_end=lambda logs: model.set_weights(zeros)))
    assert same_bits(model.get_weights(), zeros)
    begun: list[Any] = []
    see = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: begun.extend(model.get_weights()))
    fit(model, see)
    assert same_bits(begun, zeros)


def test_averages_of_a_worker_are_refused() -> None:
    model = linear_model(over())
    with pytest.raises(TrainingError, match="SwapEMAWeights, which takes a worker's"):
        fit(model, keras.callbacks.SwapEMAWeights())
