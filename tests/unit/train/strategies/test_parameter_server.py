"""Training on servers that are a thread of this process: the same code as with processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import image_model, in_shards, same_bits, weights

from insitu.base.errors import InputError, NotFinite, ParameterError, TrainingError
from insitu.exchange.pages import aligned_empty
from insitu.parameters import ConsistencyPolicy
from insitu.train import (
    BackupAndRestore,
    HybridStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
)
from insitu.train.fit.trainer import trainer_of
from insitu.train.parameter_server.keras_optimizer import KerasUpdater, serialize_optimizer
from insitu.train.parameter_server.server_task import ServerConfig
from insitu.train.strategies.parameter_server import adapt_callbacks

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
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
            pytest.param(lambda: keras.optimizers.Adam(1e-2), marks=pytest.mark.slow),
            lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9
            ),
            lambda: keras.optimizers.Ftrl(0.1, clipvalue=0.01, use_ema=True, ema_overwrite_frequency=2),
            pytest.param(lambda: keras.optimizers.Lamb(0.01, global_clipnorm=0.1), marks=pytest.mark.slow),
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), 1024.0, dynamic_growth_steps=3
            ),
        ],
        ids=["adam", "scheduled momentum", "clipped ftrl with averages", "lamb by norm", "scaled, averaged"],
    )
    def test_has_the_bits_of_the_synchronous_strategy(self, rows: Any, optimizer: Any) -> None:
        context = in_shards((0, 1), 2)
        expected = trained(MultiWorkerMirroredStrategy(context=context), rows, optimizer=optimizer())
        model = trained(over(2, mode="sync"), rows, optimizer=optimizer())
        assert same_bits(weights(model), weights(expected))
        for name, values in expected.history_.items():
            np.testing.assert_allclose(model.history_[name], values, rtol=1e-6)

    def test_a_global_norm_over_two_servers_is_that_of_all_variables(self, rows: Any) -> None:
        def optimizer() -> Any:
            return keras.optimizers.Adam(1e-2, global_clipnorm=0.05)

        context = in_shards((0, 1), 2)
        expected = trained(MultiWorkerMirroredStrategy(context=context), rows, optimizer=optimizer())
        with contextlib.ExitStack() as stack:
            config = ServerConfig(ConsistencyPolicy("sync", total_replicas=2), "refuse")
            servers = [config.server("127.0.0.1:0", context, index=i, addresses=["", ""]) for i in (0, 1)]
            addresses = tuple(stack.enter_context(server).address for server in servers)
            context = dataclasses.replace(context, servers=addresses)
            strategy = ParameterServerStrategy(context=context, mode="sync", min_piece_bytes=64)
            model = trained(strategy, rows, optimizer=optimizer())
            session = strategy._open_session()
            layout = session._client.plan
            session.close()
        assert same_bits(weights(model), weights(expected))
        assert (layout.servers, {piece.server for piece in layout.pieces}) == (2, {0})


def test_a_synchronous_fit_compares_what_workers_are_given(rows: Any) -> None:
    workers = ("127.0.0.1:1", "127.0.0.1:2")
    alone = dataclasses.replace(in_shards((0,), 2), workers=workers, shared_secret=b"0123456789abcdef")
    config = ServerConfig(ConsistencyPolicy("sync", 2, 1), "refuse")
    with config.server("127.0.0.1:0", alone) as server:
        context = dataclasses.replace(alone, servers=(server.address,))
        strategy = ParameterServerStrategy(context=context, mode="sync", replicas_to_aggregate=1)
        session = strategy._open_session()
        session.marks.set_data(0, "0 0", [1], 7)  # as a worker with other data
        with pytest.raises(InputError, match="the process of shard 1 has another batch than that of shard 0"):
            trained(strategy, rows)
        session.close()


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


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_layers_may_have_any_name_beside_state_that_moves(mode: Any) -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

    def made() -> Any:
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(8, name="state"), keras.layers.BatchNormalization(name="moves")]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)], name="state")
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    expected = made()
    with over(1, mode=mode).scope():
        model = made()
    for each in (expected, model):
        each.fit(x, x.sum(1), **{**FIT, "batch_size": 16})
    for mine, theirs in zip(weights(model), weights(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_moving_averages_of_workers_that_begin_together_are_those_of_a_common_step(mode: Any) -> None:
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32") * 0.1

    def moved(strategy: Any) -> Any:
        with strategy.scope():
            layer = keras.layers.BatchNormalization(momentum=0.5)  # three differences would be 1.5 times
            model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(x, x.sum(1), batch_size=96, epochs=1, shuffle=False, verbose=0)
        return np.stack([layer.moving_mean.numpy(), layer.moving_variance.numpy()])

    expected = moved(MultiWorkerMirroredStrategy(context=in_shards((0, 1, 2), 3)))
    np.testing.assert_allclose(moved(over(3, mode=mode)), expected, atol=1e-6)


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


def test_the_scale_of_losses_moves_and_what_overflows_is_left_out(rows: Any) -> None:
    x, y = rows
    x = x.copy()
    x[70] = np.inf  # in the second of four steps
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, clipnorm=1.0), 1024.0, dynamic_growth_steps=2
    )
    strategy, left_out = over(1), []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            left_out.append((float(optimizer.dynamic_scale.numpy()), set(strategy.left_out())))

    with strategy.scope():
        model = image_model(optimizer=optimizer, batch_norm=False)
    before = weights(model)
    model.fit(x, y, **{**FIT, "epochs": 1}, callbacks=[Sees()])
    assert left_out == [(1024, set()), (512, {0}), (512, set()), (1024, set())]
    assert all(np.isfinite(w).all() for w in weights(model))
    assert not same_bits(before, weights(model))
    told = strategy._open_session()._client.stats()[0]
    assert (told["applied"], told["rows"]) == (4, 203 - 64)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_callbacks_see_the_averages_when_a_fit_ends(rows: Any, mode: Any) -> None:
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            seen.append(self.model.get_weights())

    with over(2, mode=mode).scope():
        model = image_model(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
    epochs = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(weights(model)))
    model.fit(*rows, **FIT, callbacks=[Sees(), keep])
    assert same_bits(seen[0], model.get_weights())
    assert not same_bits(epochs[-1], weights(model))


def test_what_a_callback_restores_at_the_end_stays(rows: Any) -> None:
    kept = []
    with over(1).scope():
        model = image_model(optimizer=keras.optimizers.SGD(0.1))
    best = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(model.get_weights()))
    model.fit(*rows, **{**FIT, "epochs": 5}, callbacks=[keep, best])
    assert len(kept) == 2
    assert same_bits(model.get_weights(), kept[0])


@pytest.mark.slow
def test_a_scale_that_stays_is_undone_before_norms_are_bounded(rows: Any) -> None:
    plain = trained(over(1), rows, optimizer=keras.optimizers.SGD(0.1, clipnorm=0.1))
    scaled = trained(over(1), rows, optimizer=keras.optimizers.SGD(0.1, clipnorm=0.1, loss_scale_factor=64.0))
    assert same_bits(weights(plain), weights(scaled))


def test_a_checkpoint_that_another_life_has_under_way_ends_no_training(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = over(1)
    model = trained(strategy, rows)
    session = strategy._open_session()

    def under_way(directory: Any) -> None:
        raise ParameterError("still under way")

    monkeypatch.setattr(session._client, "checkpoint", under_way)
    session.checkpoint(tmp_path)
    assert "still under way" in caplog.text
    model.fit(*rows, **FIT)


OPTIMIZERS = {
    "scheduled adam": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    ),
    "averaged nadam": lambda: keras.optimizers.Nadam(0.01, use_ema=True, ema_momentum=0.9),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
}
EACH_ONCE = [("async", "scheduled adam"), ("sync", "averaged nadam"), ("async", "momentum")]
THE_OTHERS = [("sync", "scheduled adam"), ("async", "averaged nadam"), ("sync", "momentum")]


@pytest.mark.parametrize(
    ("mode", "optimizer"), EACH_ONCE + [pytest.param(*each, marks=pytest.mark.slow) for each in THE_OTHERS]
)
def test_servers_that_start_from_a_checkpoint_go_on_with_the_same_numbers(
    mode: Any, optimizer: str, rows: Any, tmp_path: Path
) -> None:
    """Weights, the optimizer's slots and its count of updates are all in the checkpoint."""

    def train(folder: Path | None = None, stop: int = -1) -> Any:
        context = dataclasses.replace(in_shards((0,), 1), shared_secret=b"0123456789abcdef")
        config = ServerConfig(ConsistencyPolicy(mode, 1), "refuse")
        seen, losses = [], []

        def end_epoch(epoch: int, logs: Any) -> None:
            seen.append(weights(model))
            losses.append(logs["loss"])
            if epoch == stop:
                strategy._open_session()._client.checkpoint(folder).result()
                raise KeyboardInterrupt

        with config.server("127.0.0.1:0", context, checkpoint=folder) as server:
            context = dataclasses.replace(context, servers=(server.address,))
            strategy = ParameterServerStrategy(context=context, mode=mode)
            keras.backend.clear_session()
            keras.utils.set_random_seed(7)
            with strategy.scope():
                model = image_model(optimizer=OPTIMIZERS[optimizer](), dropout=0.0)
            watch = keras.callbacks.LambdaCallback(on_epoch_end=end_epoch)
            with pytest.raises(KeyboardInterrupt) if stop >= 0 else contextlib.nullcontext():
                model.fit(*rows, **{**FIT, "epochs": 4}, callbacks=[watch])
            strategy._open_session().close()
        return [*seen, weights(model)], losses, int(model.optimizer.iterations.numpy())

    whole, losses, updates = train()
    train(tmp_path, stop=1)
    rest, again, count = train(tmp_path)
    assert (again, count) == (losses[2:], updates)
    assert all(same_bits(mine, theirs) for mine, theirs in zip(rest, whole[2:], strict=True))


def test_gradients_that_come_late_are_told_of(rows: Any) -> None:
    strategy, seen = over(2, mode="sync", replicas_to_aggregate=1), []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(set(strategy.left_out()))

    with strategy.scope():
        model = image_model()
    model.fit(*rows, **{**FIT, "epochs": 1}, callbacks=[Sees()])
    assert seen == [{1}] * 4  # of one task, in the order in which it pushes


def test_a_gradient_that_is_not_finite_is_refused_by_name(rows: Any) -> None:
    x, y = rows
    x = x.copy()
    x[150] = np.nan
    with pytest.raises(NotFinite, match="kernel"):
        trained(over(1), (x, y), batch_norm=False)
    model = trained(over(1, nan="clip"), (x, y), batch_norm=False)
    assert all(np.isfinite(w).all() for w in weights(model))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"nan": "ignore"}, {"max_staleness": None}, {"max_staleness": 1.5}, {"min_piece_bytes": 0}),
        *({"min_piece_bytes": "1 MB"}, {"mode": "sync", "replicas_to_aggregate": 0.5}),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_when_the_strategy_is_made(wrong: Any) -> None:
    with pytest.raises(InputError, match=list(wrong)[-1]):
        over(1, **wrong)
    if "nan" in wrong:
        with pytest.raises(InputError, match="nan"):
            HybridStrategy(context=in_shards((0,), 1), **wrong)


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


def test_a_model_on_servers_is_compiled_before_its_first_fit_only(rows: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with over(1).scope():
        model = image_model()
    model.compile("sgd", loss)
    model.fit(*rows, **FIT)
    with pytest.raises(TrainingError, match="is compiled once"):
        model.compile("sgd", loss)
    model.fit(*rows, **FIT)


def test_a_backup_of_keras_becomes_one_by_the_servers(
    rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keras' own would save a worker's weights."""
    models = []
    for callbacks in ([], [keras.callbacks.BackupAndRestore(tmp_path)]):
        keras.utils.set_random_seed(7)
        with over(1).scope():
            models.append(image_model())
        models[-1].fit(*rows, **FIT, callbacks=callbacks)
    assert same_bits(weights(models[0]), weights(models[1]))
    assert "so insitu.BackupAndRestore has them saved" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    own, kept = adapt_callbacks(
        [keras.callbacks.BackupAndRestore(tmp_path, save_freq=3), keras.callbacks.History()], is_chief=False
    )
    assert isinstance(own, BackupAndRestore) and own._save_freq == 3
    assert isinstance(kept, keras.callbacks.History)


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
    trainer = trainer_of(model)
    assert trainer is not None
    strategy.membership._fits = 0  # as in a new process
    sees = Sees()
    model.fit(*rows, **FIT, callbacks=[sees])
    assert sees.batches == [3, 0, 1, 2, 3]


class Loop:
    """A model, and a step of its own that trains it."""

    def __init__(self, strategy: Any, optimizers: int = 1) -> None:
        keras.utils.set_random_seed(7)
        self.strategy = strategy
        with strategy.scope():
            self.model = image_model()
            self.optimizers = [keras.optimizers.Adam(1e-2) for _ in range(optimizers)]

    def step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = LOSS(y, self.model(x, training=True))
            loss = self.strategy.compute_average_loss(losses)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        count = len(self.optimizers)
        for index, optimizer in enumerate(self.optimizers):
            optimizer.apply(gradients[index::count], variables[index::count])
        return losses

    def train(self, rows: Any, epochs: int = 2) -> list[float]:
        batches = self.strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(rows).batch(64))
        means = []
        for _ in range(epochs):
            for x, y in batches:
                losses = self.strategy.local_results(self.strategy.run(self.step, args=(x, y)))
                means.append(float(np.concatenate([np.asarray(own) for own in losses]).mean()))
        return means


def test_a_custom_loop_trains_on_servers(rows: Any) -> None:
    expected = Loop(MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)))
    losses = expected.train(rows)
    loop = Loop(over(2, mode="sync"))
    assert loop.train(rows) == losses
    loop.strategy.join()
    assert same_bits(weights(loop.model), weights(expected.model))
    with pytest.raises(TrainingError, match="one optimizer"):
        Loop(over(1), optimizers=2).train(rows, 1)
    with pytest.raises(TrainingError, match="hold the variables of one model"):
        Loop(loop.strategy).train(rows, 1)


def test_a_custom_loop_that_starts_over_pushes_nothing_twice(rows: Any) -> None:
    strategy = over(1)
    keras.backend.clear_session()  # names of layers begin anew, as in a process
    Loop(strategy).train(rows, 1)
    strategy.join()
    server = strategy._open_session()
    told, values = server._client.stats()[0], server.pull().copy()
    # Its second life: the same script from the start, on servers that have all of the first epoch.
    strategy._loop_runner, strategy._loop_steps, strategy._session = None, [], None
    strategy._membership._fits = 0
    server.sequence = 0
    strategy._session = server
    keras.backend.clear_session()
    loop = Loop(strategy)
    loop.train(rows, 1)
    assert server._client.stats()[0]["applied"] == told["applied"] == 4
    np.testing.assert_array_equal(server.pull(), values)
    strategy.join()
    loop.train(rows, 1)
    assert server._client.stats()[0]["applied"] == 8


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "ftrl", "nadam"])
def test_slots_have_the_same_names_in_each_server(optimizer: str) -> None:
    # A mirror, a server that starts again and a checkpoint find them by name, in other processes.
    text = serialize_optimizer(keras.optimizers.get(optimizer))
    made = [KerasUpdater(text, jit=False).slots("kernel", (3, 2), np.dtype("float32")) for _ in range(2)]
    assert list(made[0]) == list(made[1]) != []


@keras.saving.register_keras_serializable("insitu_tests")
class Remembers(keras.optimizers.SGD):
    """Keeps what each variable was before its last update."""

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.before = [self.add_variable_from_reference(v, "before") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign(self.before[self._get_variable_index(variable)], variable)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shape", [(), (64, 32)])
def test_a_slot_that_an_optimizer_fills_with_the_variable_keeps_the_old_values(
    jit: bool, shape: tuple[int, ...]
) -> None:
    updater = KerasUpdater(serialize_optimizer(Remembers(0.5)), jit=jit)
    value, gradient = (aligned_empty(shape, np.dtype("float32")) for _ in range(2))
    value[...], gradient[...] = 3.0, 1.0
    slots = {"v": updater.slots("v", value.shape, value.dtype)}
    for step in range(3):
        updater.update({"v": value}, {"v": gradient}, slots, step)
        before = next(array for name, array in slots["v"].items() if "before" in name)
        assert (before == 3.0 - 0.5 * step).all()
        assert (value == 2.5 - 0.5 * step).all()
