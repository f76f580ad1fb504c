"""One process: what the strategy computes, beside plain Keras and beside itself over other shards."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import check_mixed_precision, image_model, mixed_precision, same_bits, weights

import insitu
from insitu.base.context import Context
from insitu.base.errors import InputError, TrainingError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.train import MultiWorkerMirroredStrategy
from insitu.train.fit.trainer import trainer_of


def fit(model: Any, rows: Any, **options: Any) -> dict[str, list[float]]:
    settings: dict[str, Any] = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
    history: dict[str, list[float]] = model.fit(*rows, **{**settings, **options}).history
    return history


def test_one_shard_gives_the_bits_of_plain_keras(rows, strategy_over):
    plain = image_model()
    expected = fit(plain, rows, validation_data=(rows[0][:51], rows[1][:51]))
    with strategy_over(1).scope():
        model = image_model()
    history = fit(model, rows, validation_data=(rows[0][:51], rows[1][:51]))
    assert same_bits(weights(plain), weights(model))
    assert history == expected


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_agree_with_one_device_where_nothing_depends_on_the_split(rows, strategy_over, num_shards):
    plain = image_model(batch_norm=False, dropout=0)
    expected = fit(plain, rows)
    with strategy_over(num_shards).scope():
        model = image_model(batch_norm=False, dropout=0)
    history = fit(model, rows)
    for mine, theirs in zip(weights(model), weights(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)


def test_dropout_differs_by_shard_and_its_counter_goes_on(strategy_over):
    with strategy_over(2).scope():
        layers = [keras.Input((64,)), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    seen = []
    trainer = trainer_of(model)
    x, y = np.ones((4, 64), "float32"), np.zeros((4, 1), "float32")
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    step = trainer._train_executor
    for shard in (0, 1):
        step._replica.gradient(shard, (x[:2], y[:2]), step._floats[shard], step._train_records[shard])
        seen.append(step._floats[shard][:64].copy())
    assert not np.array_equal(*seen)
    counter = next(v for v in model.non_trainable_variables if "seed" in v.path).numpy()
    assert counter.tolist() == [3, 1]


def test_batch_norm_takes_the_mean_of_its_shards(strategy_over):
    with strategy_over(2).scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.array([[1.0], [3.0], [10.0], [10.0], [10.0]], "float32")
    # Slices of 5 rows over 2 shards: 2 and 3 rows, with the means 2 and 10.
    model.fit(x, np.zeros((5, 1), "float32"), batch_size=5, shuffle=False, verbose=0)
    moving_mean = model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(moving_mean, [0.5 * (2 * 2 + 3 * 10) / 5], rtol=1e-6)


def test_every_row_counts_once_when_shards_run_out_at_different_steps(strategy_over):
    with strategy_over(4).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1.0), "mae", metrics=["mae"])
    # A last batch of one row: three of four shards have none.
    x = np.arange(1, 10, dtype="float32")[:, None]
    history = fit(model, (x, np.zeros_like(x)), batch_size=8, epochs=1)
    first = 1 - np.arange(1, 9).mean()
    last = first - 9 * np.sign(first * 9)
    np.testing.assert_allclose(model.layers[0].kernel.numpy(), [[last]], rtol=1e-6)
    bias_then = -1.0
    expected = (np.arange(1, 9).sum() + abs(first * 9 + bias_then)) / 9
    np.testing.assert_allclose(history["loss"], [expected], rtol=1e-6)


def test_a_shard_without_any_rows_trains_and_evaluates_with_the_others(tmp_path):
    """All rows have the same key, so that the other shard's partition is empty."""
    rng = np.random.default_rng(0)
    x, y = rng.random((11, 4), dtype=np.float32), rng.integers(0, 3, 11)
    np.savez(tmp_path / "rows.npz", x=x, key=np.full(11, 5), label=y)
    paths = Paths(tmp_path / "home")
    import_cache(paths, "keyed", [str(tmp_path / "rows.npz")], partitions=2, key="key")
    two = Context(paths=paths, shards=(0, 1), num_shards=2)

    def classifier() -> Any:
        start = keras.initializers.GlorotUniform(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer=start)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
        return model

    data = insitu.dataset("keyed", features="x", context=two).batch(4)
    with MultiWorkerMirroredStrategy(context=two).scope():
        model = classifier()
    history = model.fit(data, epochs=2, verbose=0, validation_data=data).history
    plain = classifier()
    batches = [rows for rows in data if len(rows[1])]
    assert [len(rows[1]) for rows in batches] == [2, 2, 2, 2, 2, 1]
    for _ in range(2):
        for rows in batches:
            plain.train_on_batch(*rows)
    for mine, theirs in zip(weights(model), weights(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    expected = plain.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(model.evaluate(data, verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose([history["val_loss"][-1], history["val_accuracy"][-1]], expected, rtol=1e-5)


def _subclassed() -> Any:
    class Custom(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"my_loss": loss}

    model = Custom([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer=keras.initializers.Ones())])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_train_step_of_the_users_own(strategy_over, num_shards):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 3)).astype("float32"), rng.normal(size=(30, 2)).astype("float32")
    plain = _subclassed()
    expected = plain.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
    with strategy_over(num_shards).scope():
        model = _subclassed()
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["my_loss"], expected["my_loss"], rtol=1e-5)
    for mine, theirs in zip(weights(model), weights(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.5)},
        {"optimizer": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)},
        {"optimizer": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=3)},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
        {
            "optimizer": lambda: keras.optimizers.Adam(
                keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
            )
        },
    ],
    ids=["momentum-clipnorm", "decay-global-clipnorm", "ema", "accumulation", "schedule"],
)
def test_optimizers_act_on_the_gradient_of_the_global_batch(rows, strategy_over, options):
    plain = image_model(batch_norm=False, dropout=0, optimizer=options["optimizer"]())
    fit(plain, rows)
    with strategy_over(2).scope():
        model = image_model(batch_norm=False, dropout=0, optimizer=options["optimizer"]())
    fit(model, rows)
    for mine, theirs in zip(weights(model), weights(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


def test_an_optimizer_that_keeps_its_gradient_gets_memory_of_its_own(strategy_over):
    class Keeper(keras.optimizers.Optimizer):
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.kept = self.add_optimizer_variables(variables, "kept")

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            kept = self.kept[self._get_variable_index(variable)]
            self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * kept)
            self.assign(kept, gradient)

    def train(scope: Any) -> list[np.ndarray]:
        with scope:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16, kernel_initializer="ones")])
            model.compile(Keeper(0.1), "mse")
        x = np.random.default_rng(3).normal(size=(40, 4)).astype("float32")
        model.fit(x, np.zeros((40, 16), "float32"), batch_size=8, shuffle=False, verbose=0)
        return weights(model)

    expected = train(contextlib.nullcontext())
    assert same_bits(train(strategy_over(1).scope()), expected)


def test_sample_and_class_weights(rows, strategy_over):
    sample_weight = np.linspace(0, 2, len(rows[0])).astype("float32")
    for options in ({"sample_weight": sample_weight}, {"class_weight": {0: 0.2, 1: 3.0}}):
        plain = image_model(batch_norm=False, dropout=0)
        expected = fit(plain, rows, **options)
        with strategy_over(2).scope():
            model = image_model(batch_norm=False, dropout=0)
        history = fit(model, rows, **options)
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
        for mine, theirs in zip(weights(model), weights(plain), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_trains_as_without_a_strategy(strategy_over, policy: str) -> None:
    scopes = [contextlib.nullcontext, *(lambda n=n: strategy_over(n).scope() for n in (1, 2))]
    runs = [mixed_precision(scope, policy) for scope in scopes]
    check_mixed_precision(runs)
    wanted = (2, 2.0**14) if policy == "mixed_float16" else (3, None)
    assert (runs[0]["iterations"], runs[0]["scale"]) == wanted


def test_several_inputs_and_outputs_with_an_embedding(strategy_over):
    def build() -> Any:
        word = keras.Input((3,), dtype="int32", name="word")
        number = keras.Input((2,), name="number")
        normal = keras.initializers.RandomNormal(seed=4)
        embedded = keras.layers.Embedding(11, 4, embeddings_initializer=normal)
        flat = keras.layers.Flatten()(embedded(word))
        joined = keras.layers.Concatenate()([flat, number])
        start = keras.initializers.GlorotUniform(seed=6)
        out = {
            "a": keras.layers.Dense(1, name="a", kernel_initializer=start)(joined),
            "b": keras.layers.Dense(3, name="b", kernel_initializer=start)(joined),
        }
        model = keras.Model({"word": word, "number": number}, out)
        model.compile(
            keras.optimizers.SGD(0.05),
            loss={"a": "mse", "b": "mae"},
            loss_weights={"a": 1.0, "b": 0.5},
            metrics={"a": ["mae"], "b": ["mse"]},
        )
        return model

    rng = np.random.default_rng(2)
    # No smaller batch at the end: Keras itself weighs the losses of single outputs by batches then.
    words = rng.integers(0, 11, (45, 3)).astype("int32")
    x = {"word": words, "number": rng.normal(size=(45, 2)).astype("f4")}
    y = {"a": rng.normal(size=(45, 1)).astype("f4"), "b": rng.normal(size=(45, 3)).astype("f4")}
    plain = build()
    expected = fit(plain, (x, y), batch_size=15)
    with strategy_over(2).scope():
        model = build()
    history = fit(model, (x, y), batch_size=15)
    assert history.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-4)
    predicted, want = model.predict(x, verbose=0), plain.predict(x, verbose=0)
    for name in want:
        np.testing.assert_allclose(predicted[name], want[name], rtol=1e-3, atol=1e-5)


def test_evaluate_predict_and_single_batches(rows, strategy_over):
    x, y = rows
    plain = image_model()
    with strategy_over(3).scope():
        model = image_model()
    model.set_weights(plain.get_weights())
    assert model.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    assert model.test_on_batch(x, y) == pytest.approx(plain.test_on_batch(x, y), rel=1e-5)
    model.train_on_batch(x[:9], y[:9])
    assert model.optimizer.iterations.numpy() == 1


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_per_epoch_goes_on_where_the_last_epoch_stopped(strategy_over):
    with strategy_over(2).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    seen = []
    x = np.arange(10, dtype="float32")[:, None]
    trainer = trainer_of(model)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(((trainer.position.epoch, trainer.position.step), batch))

    model.fit(
        x,
        x,
        batch_size=4,
        steps_per_epoch=2,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[Watch()],
    )
    # As in Keras: the second epoch ends where the data does.
    assert seen == [((0, 1), 0), ((0, 2), 1), ((1, 1), 0), ((2, 1), 0), ((2, 2), 1)]
    assert model.optimizer.iterations.numpy() == 5


def test_shuffled_arrays_follow_the_seed(rows, strategy_over):
    results = []
    for _ in range(2):
        with strategy_over(2).scope():
            model = image_model()
        fit(model, rows, shuffle=True)
        results.append(weights(model))
    assert same_bits(*results)
    with strategy_over(2).scope():
        model = image_model()
    fit(model, rows, shuffle=False)
    assert not same_bits(results[0], weights(model))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: MultiWorkerMirroredStrategy("xla"), "communication"),
        (lambda: MultiWorkerMirroredStrategy("nccl"), "communication"),
        (lambda: MultiWorkerMirroredStrategy(compression="zip"), "compression"),
    ],
)
def test_communication_that_is_not_there(what, message):
    with pytest.raises(TrainingError, match=message):
        what()


def test_what_cannot_be_combined_over_shards_is_refused(rows, strategy_over):
    with strategy_over(2).scope():
        summed = image_model(loss=keras.losses.SparseCategoricalCrossentropy(True, reduction="none"))
    with pytest.raises(TrainingError, match="reduction"):
        fit(summed, rows)
    with strategy_over(2).scope():
        second = image_model()
        second.other_optimizer = keras.optimizers.SGD()
    with pytest.raises(TrainingError, match="other_optimizer"):
        fit(second, rows)


def test_a_layer_with_keras_trainer_is_a_model(strategy_over):
    """Keras' own tests make models in this way, without keras.Model."""
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    class Model(TensorFlowTrainer, keras.layers.Dense):
        def __init__(self):
            keras.layers.Dense.__init__(self, 1)
            TensorFlowTrainer.__init__(self)

    with strategy_over(2).scope():
        model = Model()
        model.compile("sgd", "mse", metrics=["mae"])
    data = np.ones((8, 3)), np.zeros((8, 1))
    assert list(fit(model, data)) == ["loss", "mae"]
    assert len(model.evaluate(*data, verbose=0)) == 2
    assert model.bias.numpy() != 0


def test_a_model_of_a_tf_distribute_strategy_is_refused(strategy_over):
    import tensorflow as tf

    distribution = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy_over(1).scope(), distribution.scope():
        image_model()
    with (
        strategy_over(2).scope(),
        distribution.scope(),
        pytest.raises(TrainingError, match=r"Received: .*tf\.distribute\.MirroredStrategy\. Make it"),
    ):
        image_model()


def test_batches_with_fewer_rows_than_replicas_and_a_generator(rows, strategy_over):
    few = tuple(part[:7] for part in rows)
    with strategy_over(4).scope():
        model = image_model()
    fit(model, few, batch_size=3, epochs=1)
    assert model.optimizer.iterations.numpy() == 3
    model.fit((pair for pair in [few, few]), steps_per_epoch=2, verbose=0)
    assert model.optimizer.iterations.numpy() == 5
    with pytest.raises(InputError, match="same number of rows"):
        model.predict({"a": np.zeros((3, 1)), "b": np.zeros((4, 1))}, verbose=0)


def test_scopes_of_two_strategies_do_not_nest(strategy_over):
    outer, inner = strategy_over(1), strategy_over(1)
    with outer.scope(), pytest.raises(TrainingError, match="inside another"), inner.scope():
        pass
    with inner.scope():
        pass


class Kept(keras.metrics.Metric):
    """Keeps a number for each way of combining."""

    def __init__(self) -> None:
        super().__init__(name="kept")
        self.largest = self.add_weight(name="largest", initializer="zeros")
        self.average = self.add_weight(name="average", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        errors = keras.ops.abs(y - p)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(errors)))
        self.average.assign(0.8 * self.average + 0.2 * keras.ops.mean(errors))
        self.batches.assign_add(1.0)
        self.total.assign_add(keras.ops.sum(errors))

    def result(self):
        names = ("largest", "average", "batches", "total")
        return {name: getattr(self, name) + 0.0 for name in names}


class Counts(keras.layers.Layer):
    def build(self, shape):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.rows = self.add_weight(name="rows", dtype="int32", **options)
        self.largest = self.add_weight(name="largest", **options)
        self.declared = self.add_weight(name="declared", aggregation="sum", **options)

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(keras.ops.shape(x)[0])
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(x)))
            self.declared.assign_add(keras.ops.sum(x))
        return x


def with_state_of_its_own() -> Any:
    """(history, evaluation, weights) of a model with metrics and weights of a user's own."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 3)).astype("float32"), rng.normal(size=(30, 1)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), Counts(), keras.layers.Dense(1)])

    def scalar(y, p):
        return keras.ops.mean(keras.ops.abs(y - p))

    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Kept(), scalar])
    history = fit(model, (x, y), batch_size=8, validation_data=(x[:13], y[:13]))
    return history, model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True), model.get_weights()


@pytest.mark.parametrize("num_shards", [2, 3])
def test_state_of_the_users_own_combines_to_what_one_device_has(strategy_over, num_shards):
    expected, evaluated, values = with_state_of_its_own()
    with strategy_over(num_shards).scope():
        history, results, mine = with_state_of_its_own()
    assert history.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-4)
    for name in evaluated:
        np.testing.assert_allclose(results[name], evaluated[name], rtol=1e-4)
    for one, other in zip(mine, values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_logs_of_steps_are_those_that_they_return(strategy_over):
    class Own(keras.Sequential):
        def test_step(self, data):
            x, y = data
            error = keras.ops.mean(keras.ops.square(y - self(x, training=False)))
            return {"mine": error, "loss": error}

    x, y = np.arange(15.0).reshape(5, 3).astype("float32"), np.ones((5, 1), "float32")
    results = []
    for scope in (contextlib.nullcontext(), strategy_over(2).scope()):
        keras.utils.set_random_seed(3)
        with scope:
            model = Own([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        results.append(model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True))
    assert results[1].keys() == results[0].keys() == {"mine", "loss"}
    for name in results[0]:
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5)


class AsInTheGuide(keras.Sequential):
    """Steps as Keras' guide writes them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._measure(y, y_pred, loss)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self._measure(y, y_pred, self.compute_loss(y=y, y_pred=y_pred))

    def _measure(self, y, y_pred, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def test_steps_as_in_the_guide_of_keras(strategy_over):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(29, 3)).astype("float32"), rng.normal(size=(29, 1)).astype("float32")
    results = []
    for scope in (contextlib.nullcontext(), strategy_over(3).scope()):
        keras.utils.set_random_seed(3)
        with scope:
            model = AsInTheGuide([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae", keras.metrics.R2Score()])
        predicted = model.predict(x, verbose=0)
        history = fit(model, (x, y), batch_size=8, validation_data=(x, y))
        assert predicted.shape == y.shape
        results.append((history, weights(model)))
    (expected, values), (history, mine) = results
    assert history.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-4)
    for one, other in zip(mine, values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_loss_that_sums_is_refused_by_training_only(rows, strategy_over):
    def summed(y, p):
        return keras.ops.sum(keras.ops.square(y - p))

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with strategy_over(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", summed)
    assert model.predict(x, verbose=0).shape == (8, 1)
    with pytest.raises(TrainingError, match="a loss that sums over rows"):
        model.fit(x, y, verbose=0)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_with_nothing_to_train_is_fitted_for_its_metrics(strategy_over):
    x, y = np.arange(24.0).reshape(8, 3).astype("float32"), np.ones((8, 1), "float32")
    results = []
    for scope in (contextlib.nullcontext(), strategy_over(2).scope()):
        with scope:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.trainable = False
            model.compile("sgd", "mse", metrics=["mae"])
        results.append(model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history)
        assert model.optimizer.iterations.numpy() == 0
    assert results[1].keys() == results[0].keys()
    for name in results[0]:
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-5)


def test_the_old_choice_of_communication_may_come_by_place():
    chosen = tf.distribute.experimental.CollectiveCommunication
    for each in (chosen.NCCL, chosen.RING, insitu.experimental.CommunicationImplementation.AUTO):
        assert MultiWorkerMirroredStrategy(each).communication == "ring"


def test_gpus_on_several_hosts_take_the_ring_unless_that_is_allowed(monkeypatch: pytest.MonkeyPatch):
    """XLA's collectives have no authentication. JAX is played, as it would be with GPUs."""
    pytest.importorskip("jax")
    from insitu.train.backends.jax.spmd import distributed
    from insitu.train.strategies.multi_worker_mirrored import _choose

    monkeypatch.setattr(distributed, "visible_accelerators", lambda: 1)
    monkeypatch.setattr(distributed, "backend_started", lambda: False)
    assert _choose("jax", ("127.0.0.1:1", "127.0.0.1:2"))[0] == "xla"
    way, why = _choose("jax", ("10.0.0.1:1", "10.0.0.2:1"))
    assert way == "ring" and "--allow-unauthenticated" in why
    monkeypatch.setenv("INSITU_ALLOW_UNAUTHENTICATED", "1")
    assert _choose("jax", ("10.0.0.1:1", "10.0.0.2:1"))[0] == "xla"
