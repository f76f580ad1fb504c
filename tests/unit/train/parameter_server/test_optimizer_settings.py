"""What a script or a callback does to the optimizer reaches the servers, or is refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards, same_bits, weights
from parameter_servers import SECRET, servers

from insitu.base.errors import TrainingError
from insitu.base.spec import TaskId
from insitu.parameters import ConsistencyPolicy
from insitu.train import HybridStrategy, MultiWorkerMirroredStrategy, ParameterServerStrategy
from insitu.train.parameter_server.layers import Embedding
from insitu.train.parameter_server.optimizer_settings import OptimizerSettings
from insitu.train.parameter_server.server_task import ServerConfig, make_model_updater
from insitu.train.parameter_server.session import ParameterServerSession, ShardPush
from insitu.train.replica import Span

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
LABELS = ROWS @ np.array([[2.0], [-1.0]], "float32")
MODES = ["async", "bounded", "sync"]


def over(num_shards: int = 1, **options: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(context=in_shards(tuple(range(num_shards)), num_shards), **options)


def linear_model(strategy: Any, optimizer: Any = None) -> Any:
    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 3) -> Any:
    options = {"batch_size": 8, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(ROWS, LABELS, callbacks=list(callbacks), **options).history


def lower(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch else rate


class FakeClient:
    def __init__(self, is_chief: bool = True) -> None:
        self.is_chief, self.mode = is_chief, "async"
        self.learning_rates: dict[str, float] = {}
        self.sent: list[dict[str, float]] = []

    def set_learning_rates(self, rates: dict[str, float]) -> Any:
        self.sent.append(rates)
        return self

    def result(self) -> None:
        """As of a future."""


def test_the_chief_sends_a_learning_rate_once_and_others_take_over_what_the_servers_have() -> None:
    optimizer, client = keras.optimizers.SGD(0.5), FakeClient()
    settings = OptimizerSettings(optimizer, client, tables=["words"])
    settings.send()
    assert client.sent == []
    optimizer.learning_rate = 0.25
    settings.send()
    settings.send()
    assert client.sent == [{"": 0.25, "words": 0.25}]
    other, worker = keras.optimizers.SGD(0.5), FakeClient(is_chief=False)
    settings = OptimizerSettings(other, worker)
    other.learning_rate = 0.125
    settings.send()
    assert worker.sent == []
    worker.learning_rates = {"": 0.25}
    settings.receive(7)
    assert float(other.learning_rate) == 0.25


def test_a_pull_leaves_the_chief_what_it_has_set_and_not_sent_yet() -> None:
    for is_chief, enters, expected in ((True, False, 0.25), (True, True, 0.5), (False, False, 0.5)):
        optimizer, client = keras.optimizers.SGD(0.5), FakeClient(is_chief)
        settings = OptimizerSettings(optimizer, client)
        client.learning_rates = {"": 0.5}
        settings.receive(3)
        optimizer.learning_rate = 0.25
        settings.receive(4, enters=enters)
        assert float(optimizer.learning_rate) == expected, (is_chief, enters)
        settings.send()
        assert client.sent == ([{"": 0.25}] if expected == 0.25 else [])


def test_callbacks_see_the_servers_count_of_updates_in_each_mode() -> None:
    optimizer = keras.optimizers.SGD(0.5)
    settings = OptimizerSettings(optimizer, FakeClient())
    settings.receive(7, is_sent=True)
    assert int(optimizer.iterations) == 0, "a call into the backend that nobody needs"
    settings.show_updates()
    assert int(optimizer.iterations) == 7


def test_a_fit_that_goes_on_in_an_epoch_keeps_the_servers_learning_rate() -> None:
    optimizer, client = keras.optimizers.SGD(0.5), FakeClient()
    settings = OptimizerSettings(optimizer, client)
    client.learning_rates = {"": 0.25}
    settings.receive(3)
    settings.resume()
    optimizer.learning_rate = 0.125  # a callback halves it at the epoch's beginning, for the second time
    settings.send()
    assert client.sent == [] and float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = 0.125
    settings.send()
    assert client.sent == [{"": 0.125}]


def test_a_schedule_is_read_at_the_servers_version() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.5, 0.25])
    optimizer = keras.optimizers.SGD(schedule)
    settings = OptimizerSettings(optimizer, FakeClient())
    settings.send()
    settings.receive(4)
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == 0.25


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (lambda o: setattr(o, "momentum", 0.5), r"SGD\.momentum = 0\.5 instead of 0\.9"),
        (lambda o: setattr(o, "weight_decay", 0.1), r"SGD\.weight_decay = 0\.1 instead of None"),
        (
            lambda o: setattr(o, "learning_rate", keras.optimizers.schedules.CosineDecay(0.1, 9)),
            r"SGD\.learning_rate = CosineDecay",
        ),
    ],
)
def test_other_settings_are_refused(change: Callable[[Any], None], received: str) -> None:
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    settings = OptimizerSettings(optimizer, FakeClient())
    settings.send()
    change(optimizer)
    with pytest.raises(TrainingError, match=received):
        settings.send()


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduler_s_learning_rate_reaches_the_servers(mode: Any) -> None:
    stops = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch else rate)
    model = linear_model(over(mode=mode))
    history = fit(model, stops, epochs=4)
    assert history["learning_rate"] == pytest.approx([0.1, 0, 0, 0])
    assert history["loss"][1] == history["loss"][2] == history["loss"][3]


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Lamb])
def test_scheduled_training_has_the_numbers_of_plain_keras(optimizer: Any) -> None:
    reference = linear_model(MultiWorkerMirroredStrategy(context=in_shards((0,), 1)), optimizer(0.1))
    expected = fit(reference, keras.callbacks.LearningRateScheduler(lower))
    for mode in ("async", "sync"):
        model = linear_model(over(mode=mode), optimizer(0.1))
        history = fit(model, keras.callbacks.LearningRateScheduler(lower))
        assert history["learning_rate"] == expected["learning_rate"]
        np.testing.assert_allclose(model.get_weights()[0], reference.get_weights()[0], rtol=1e-5)
        if mode == "sync":
            assert same_bits(weights(model), weights(reference))


def test_a_plateau_lowers_the_learning_rate_and_a_script_may_set_it_between_fits() -> None:
    model = linear_model(over())
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=100.0)
    assert fit(model, plateau)["learning_rate"] == pytest.approx([0.1, 0.1, 0.05])
    model.optimizer.learning_rate = 0.0
    before = model.get_weights()
    fit(model)
    assert same_bits(model.get_weights(), before)


def test_a_custom_loop_s_learning_rate_reaches_the_servers() -> None:
    strategy = over()
    with strategy.scope():
        weight = keras.Variable(np.ones(2, "float32"), name="w")
        optimizer = keras.optimizers.SGD(0.1)

    def step(rows: Any) -> None:
        optimizer.apply([keras.ops.mean(rows, axis=0)], [weight])

    strategy.run(step, (np.ones((4, 2), "float32"),))
    optimizer.learning_rate = 0.0
    strategy.run(step, (np.ones((4, 2), "float32"),))
    assert keras.ops.convert_to_numpy(weight).tolist() == pytest.approx([0.9, 0.9])


class Replica:
    floats_size, floats_dtype = 2, np.dtype("float32")

    def __init__(self) -> None:
        value = np.ones(2, "float32")
        self.variable = SimpleNamespace(path="w", trainable=True, insitu_rows=False, numpy=lambda: value)

    def float_spans(self) -> Any:
        return [(self.variable, Span(0, 2, (2,)))]

    def assign(self, values: Any) -> None:
        """Keep nothing."""


def test_of_two_workers_the_chief_decides_and_the_other_sees_it() -> None:
    rules = ConsistencyPolicy("async", 2)
    options = {"total_replicas": 2, "make_updater": make_model_updater}
    model: Any = SimpleNamespace(non_trainable_variables=[], jit_compile=False)
    with servers(2, **options) as addresses, contextlib.ExitStack() as stack:
        both = []
        for index in range(2):
            context = dataclasses.replace(in_shards((index,), 2), servers=tuple(addresses))
            context = dataclasses.replace(context, task=TaskId("worker", index), shared_secret=SECRET)
            session = ParameterServerSession(context, ServerConfig(rules, "refuse"))
            stack.callback(session.close)
            optimizer = keras.optimizers.SGD(0.5)
            session.define(model, optimizer, Replica(), exact=False, min_piece_bytes=4)
            both.append((session, optimizer))
        (chief, first), (worker, second) = both
        second.learning_rate = 0.125

        def push(session: Any, shard: int) -> list[float]:
            floats = session.gradient_buffer(0)
            floats[:] = 1.0
            return session.exchange([ShardPush(shard, 1, floats, None)]).tolist()

        assert push(worker, 1) == [0.5, 0.5]  # only the chief's is sent
        first.learning_rate = 0.25
        assert push(chief, 0) == [0.25, 0.25]
        assert push(worker, 1) == [0.0, 0.0]
        assert float(second.learning_rate) == 0.25


@pytest.mark.parametrize("kind", [ParameterServerStrategy, HybridStrategy])
@pytest.mark.parametrize("own", [False, True], ids=["the model's optimizer", "an optimizer of the tables"])
def test_tables_follow_the_models_learning_rate_unless_they_have_an_optimizer(kind: Any, own: bool) -> None:
    tables = keras.optimizers.SGD(0.5) if own else None
    strategy = kind(table_optimizer=tables, context=in_shards((0,), 1))
    with strategy.scope():
        given = keras.Input((), dtype="int64")
        rows = Embedding(2, embeddings_initializer="ones", name=f"rows-{own}")(given)
        model = keras.Model(given, keras.layers.Dense(1, kernel_initializer="ones")(rows))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    stop = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0)
    keys = np.arange(8)
    model.fit(keys, np.zeros(8), batch_size=8, verbose=0, callbacks=[stop])
    outputs = model.predict(keys, verbose=0)
    assert (outputs == 2.0).all() != own
