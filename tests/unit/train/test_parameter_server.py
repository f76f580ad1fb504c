"""Training on servers that are a thread of this process: the same code as with processes of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import image_model, in_shards, same_bits, weights

from insitu.errors import InputError, NotFinite, TrainingError
from insitu.train import MultiWorkerMirroredStrategy, ParameterServerStrategy
from insitu.train.binding import binding_of
from insitu.train.servers.optimizer import KerasUpdater, serialize_optimizer

FIT: dict[str, Any] = {"batch_size": 64, "epochs": 2, "shuffle": False, "verbose": 0}


def over(num_shards: int, **options: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(context=in_shards(tuple(range(num_shards)), num_shards), **options)


def trained(strategy: Any, rows: Any, **compile_options: Any) -> Any:
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = image_model(**compile_options)
    model.history_ = model.fit(*rows, **FIT).history
    return model


class TestSync:
    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda: keras.optimizers.Adam(1e-2),
            lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9
            ),
            lambda: keras.optimizers.Ftrl(0.1, clipvalue=0.01, use_ema=True, ema_overwrite_frequency=2),
            lambda: keras.optimizers.Lamb(0.01, global_clipnorm=0.1),
        ],
        ids=["adam", "scheduled momentum", "clipped ftrl with averages", "lamb by norm"],
    )
    def test_has_the_bits_of_the_synchronous_strategy(self, rows: Any, optimizer: Any) -> None:
        context = in_shards((0, 1), 2)
        expected = trained(MultiWorkerMirroredStrategy(context=context), rows, optimizer=optimizer())
        model = trained(over(2, mode="sync"), rows, optimizer=optimizer())
        assert same_bits(weights(model), weights(expected))
        for name, values in expected.history_.items():
            np.testing.assert_allclose(model.history_[name], values, rtol=1e-6)

    def test_a_global_norm_needs_one_server(self) -> None:
        from insitu.train.servers.definition import check_optimizer

        with pytest.raises(TrainingError, match="--ps 1"):
            check_optimizer(keras.optimizers.SGD(global_clipnorm=1.0), exact=True, servers=2)
        check_optimizer(keras.optimizers.SGD(global_clipnorm=1.0), exact=False, servers=2)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_learns_without_a_common_step(rows: Any, mode: Any) -> None:
    model = trained(over(1, mode=mode), rows)
    assert model.history_["loss"][-1] < model.history_["loss"][0]
    x, y = rows
    assert model.evaluate(x, y, verbose=0, return_dict=True).keys() == {"loss", "accuracy", "top"}
    assert model.predict(x, verbose=0).shape == (203, 2)


def test_one_worker_that_waits_for_nobody_does_what_keras_does(rows: Any) -> None:
    options = {"batch_norm": True, "dropout": 0.0}
    for optimizer in (
        lambda: keras.optimizers.Adam(1e-2, clipnorm=0.05),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.1),
        lambda: keras.optimizers.RMSprop(1e-3),
    ):
        expected = trained(MultiWorkerMirroredStrategy(), rows, optimizer=optimizer(), **options)
        model = trained(over(1), rows, optimizer=optimizer(), **options)
        for mine, theirs in zip(weights(model), weights(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-5)


def test_a_second_fit_goes_on(rows: Any) -> None:
    strategy = over(2, mode="sync")
    model = trained(strategy, rows)
    again = model.fit(*rows, **FIT).history
    assert again["loss"][-1] < model.history_["loss"][-1]
    keras.utils.set_random_seed(7)
    other = MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2))
    with other.scope():
        expected = image_model()
    expected.fit(*rows, **FIT)
    expected.fit(*rows, **FIT)
    assert same_bits(weights(model), weights(expected))


def test_a_gradient_that_is_not_finite_is_refused_by_name(rows: Any) -> None:
    x, y = rows
    x = x.copy()
    x[150] = np.nan
    with pytest.raises(NotFinite, match="kernel"):
        trained(over(1), (x, y), batch_norm=False)
    model = trained(over(1, nan="clip"), (x, y), batch_norm=False)
    assert all(np.isfinite(w).all() for w in weights(model))


def test_what_cannot_be_is_refused(rows: Any) -> None:
    with pytest.raises(InputError, match="replicas_to_aggregate"):
        over(2, mode="sync", replicas_to_aggregate=3)
    with pytest.raises(InputError, match="mode"):
        over(1, mode="often")
    context = in_shards((0,), 1)
    with pytest.raises(TrainingError, match="--ps 1"):
        ParameterServerStrategy(context=type(context)(paths=context.paths, job_id="a-job"))
    strategy = over(1)
    trained(strategy, rows)
    with pytest.raises(TrainingError, match="one model"):
        trained(strategy, rows)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(TrainingError, match="LossScaleOptimizer"):
        trained(over(1), rows, optimizer=scaled)


def test_a_worker_that_comes_back_goes_on_behind_what_was_applied(rows: Any) -> None:
    """Its second life is another model on the same servers."""
    strategy = over(1)

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise KeyboardInterrupt

    class Sees(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.batches: list[int] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.batches.append(batch)

    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = image_model()
    with pytest.raises(KeyboardInterrupt):
        model.fit(*rows, **FIT, callbacks=[Dies()])
    binding = binding_of(model)
    assert binding is not None
    strategy.membership._fits = 0  # as in a new process
    sees = Sees()
    model.fit(*rows, **FIT, callbacks=[sees])
    assert sees.batches == [3, 0, 1, 2, 3]


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "ftrl"])
def test_slots_have_the_same_names_in_each_server(optimizer: str) -> None:
    # A mirror, a server that starts again and a checkpoint find them by name, in other processes.
    text = serialize_optimizer(keras.optimizers.get(optimizer))
    made = [KerasUpdater(text, jit=False).slots("kernel", (3, 2), np.dtype("float32")) for _ in range(2)]
    assert list(made[0]) == list(made[1]) != []
