"""Cases: models, layers, optimizers, precision, saving."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_case_tools import (
    BATCH,
    FIT,
    Run,
    case,
    compiled,
    dense,
    numbers,
    outcome,
    regress,
    sparse_loss,
)


def trained(run: Run, make: Any, x: Any, y: Any, **compile_options: Any) -> dict[str, Any]:
    """Makes and trains a model, then evaluates it and predicts."""
    with run.scope():
        model = compiled(make(), **compile_options)
    history = model.fit(x, y, **FIT)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return outcome(
        model, history, evaluated=evaluated, predicted=model.predict(x, batch_size=BATCH, verbose=0)
    )


def stack(shape: tuple[int | None, ...], *layers: Any) -> Any:
    return keras.Sequential([keras.Input(shape), *layers])


# Kinds of models


class Subclassed(keras.Model):
    """Layers of which Keras knows the shapes only when the first batch comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(4, "tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.first(x))


@case()
def subclassed_model(run: Run) -> dict[str, Any]:
    return trained(run, Subclassed, *run.rows())


@case()
def sequential_model_without_an_input(run: Run) -> dict[str, Any]:
    layers = keras.layers
    return trained(run, lambda: keras.Sequential([layers.Dense(3, "relu"), layers.Dense(1)]), *run.rows())


@case()
def functional_model_with_shared_layers(run: Run) -> dict[str, Any]:
    x, y = run.rows()

    def make() -> Any:
        a, b = keras.Input((2,)), keras.Input((2,))
        shared = keras.layers.Dense(3, "tanh")
        return keras.Model([a, b], keras.layers.Dense(1)(shared(a) * shared(b)))

    return trained(run, make, [x[:, :2], x[:, 2:]], y)


@case()
def model_inside_a_model(run: Run) -> dict[str, Any]:
    def make() -> Any:
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(1)(Subclassed()(dense(4)(inputs))))

    # At a rate of 0.1 one bit of the input moves the predictions of plain Keras by 0.2 %.
    return trained(run, make, *run.rows(), optimizer=keras.optimizers.SGD(0.02))


@case()
def model_made_outside_and_compiled_in_scope(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    model = dense()
    model.build((None, 4))
    with run.scope():
        compiled(model)
    return outcome(model, model.fit(x, y, **FIT))


@case()
def model_called_on_a_batch(run: Run) -> dict[str, Any]:
    model, history = regress(run)
    return outcome(model, history, called=numbers(model(run.rows()[0])))


# Layers


@case(apart=["weights", "history", "evaluated", "predicted"])
def batch_normalization(run: Run) -> dict[str, Any]:
    """The statistics of a replica are those of its own rows, as in tf.distribute. What must hold: training
    learns, and the moved mean is that of all rows."""
    x, y = run.rows(40)
    norm = keras.layers.BatchNormalization(momentum=0.5)
    result = trained(run, lambda: stack((4,), norm, keras.layers.Dense(1)), x, y)
    course = result["history"]["loss"]
    return {**result, "learns": course[-1] < course[0], "mean": numbers(norm.moving_mean)}


@case()
def batch_normalization_frozen(run: Run) -> dict[str, Any]:
    def make() -> Any:
        norm = keras.layers.BatchNormalization()
        norm.trainable = False
        return stack((4,), norm, keras.layers.Dense(1))

    return trained(run, make, *run.rows())


@case(apart=["weights", "history", "evaluated", "predicted"])
def dropout(run: Run) -> dict[str, Any]:
    """Each replica draws from a stream of its own. What must hold: the number of draws."""
    drop = keras.layers.Dropout(0.3, seed=5)
    result = trained(
        run, lambda: stack((4,), keras.layers.Dense(8, "tanh"), drop, keras.layers.Dense(1)), *run.rows()
    )
    return {**result, "seed": numbers(drop.seed_generator.state)}


@case(apart=["weights", "history", "evaluated", "predicted"])
def dropout_without_a_seed(run: Run) -> dict[str, Any]:
    layers = keras.layers
    return trained(
        run, lambda: stack((4,), layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(1)), *run.rows()
    )


@case()
def layer_normalization(run: Run) -> dict[str, Any]:
    layers = keras.layers
    return trained(run, lambda: stack((4,), layers.LayerNormalization(), layers.Dense(1)), *run.rows())


@case()
def convolution(run: Run) -> dict[str, Any]:
    x = run.rng().normal(size=(21, 6, 6, 1)).astype("float32")
    layers = keras.layers
    return trained(
        run,
        lambda: stack(
            (6, 6, 1),
            layers.Conv2D(3, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ),
        x,
        run.labels(21),
        loss=sparse_loss(),
        metrics=["accuracy"],
    )


@case()
def embedding(run: Run) -> dict[str, Any]:
    x = run.rng().integers(0, 6, (37, 3))
    layers = keras.layers
    return trained(
        run, lambda: stack((3,), layers.Embedding(6, 4), layers.Flatten(), layers.Dense(1)), x, run.rows()[1]
    )


@case(apart=["weights", "history", "evaluated", "predicted"])
def embedding_with_adam(run: Run) -> dict[str, Any]:
    """On TensorFlow Keras squares the gradient of each occurrence of a row of the table, instead of their
    sum, as on other backends. In a scope they are added up."""
    x = run.rng().integers(0, 6, (37, 3))
    layers = keras.layers
    make = lambda: stack((3,), layers.Embedding(6, 4), layers.Flatten(), layers.Dense(1))  # noqa: E731
    result = trained(run, make, x, run.rows()[1], optimizer=keras.optimizers.Adam(0.01))
    return {**result, "learns": result["history"]["loss"][-1] < result["history"]["loss"][0]}


@case()
def lstm(run: Run) -> dict[str, Any]:
    x = run.rng().normal(size=(21, 5, 3)).astype("float32")
    return trained(run, lambda: stack((5, 3), keras.layers.LSTM(4), keras.layers.Dense(1)), x, x.sum((1, 2)))


@case()
def bidirectional_gru(run: Run) -> dict[str, Any]:
    x = run.rng().normal(size=(21, 5, 3)).astype("float32")
    layers = keras.layers
    make = lambda: stack((5, 3), layers.Bidirectional(layers.GRU(3, return_sequences=True)), layers.Dense(1))  # noqa: E731
    return trained(run, make, x, x.sum(2, keepdims=True))


@case()
def stateful_rnn(run: Run) -> dict[str, Any]:
    """Row i of each batch continues from row i of the batch before. The number of rows is fixed."""
    x = run.rng().normal(size=(32, 5, 3)).astype("float32")
    y = x.sum((1, 2))
    with run.scope():
        rnn = keras.layers.SimpleRNN(4, stateful=True)
        model = compiled(keras.Sequential([keras.Input(batch_shape=(8, 5, 3)), rnn, keras.layers.Dense(1)]))
    history = model.fit(x, y, **FIT)
    state = numbers(rnn.states[0])
    rnn.reset_state()
    predicted = model.predict(x, batch_size=8, verbose=0)
    return outcome(model, history, state=state, predicted=predicted)


@case()
def fixed_batch_shape(run: Run) -> dict[str, Any]:
    x, y = run.rows(32)
    return trained(
        run, lambda: keras.Sequential([keras.Input(batch_shape=(8, 4)), keras.layers.Dense(1)]), x, y
    )


@case()
def mask_of_equal_lengths(run: Run) -> dict[str, Any]:
    x = run.rng().integers(1, 6, (21, 5))
    x[:, 3:] = 0
    layers = keras.layers
    make = lambda: stack((5,), layers.Embedding(6, 4, mask_zero=True), layers.LSTM(3), layers.Dense(1))  # noqa: E731
    return trained(run, make, x, run.rows(21)[1])


@case()
def mask_in_the_loss(run: Run) -> dict[str, Any]:
    """A masked loss is divided by the time steps that count, of all replicas."""
    x = run.rng().integers(1, 6, (21, 5))
    for row, length in enumerate(run.rng(1).integers(1, 6, 21)):
        x[row, length:] = 0
    layers = keras.layers
    make = lambda: stack((5,), layers.Embedding(6, 4, mask_zero=True), layers.Dense(1))  # noqa: E731
    return trained(run, make, x, (x % 3)[..., None].astype("float32"))


@case()
def mask_of_a_class(run: Run) -> dict[str, Any]:
    """A class that is ignored counts nowhere, and each replica has another number of its entries."""
    x, y = run.rng().integers(0, 6, (21, 5)), run.rng(1).integers(0, 4, (21, 5))
    y[:7, 1:] = 3
    layers = keras.layers
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
    return trained(run, lambda: stack((5,), layers.Embedding(6, 4), layers.Dense(4)), x, y, loss=loss)


@case()
def attention(run: Run) -> dict[str, Any]:
    x = run.rng().normal(size=(21, 4, 6)).astype("float32")

    def make() -> Any:
        inputs = keras.Input((4, 6))
        mixed = keras.layers.MultiHeadAttention(2, 3)(inputs, inputs)
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(mixed)))

    # The bias of keys has no gradient but noise, which an optimizer without moments leaves small.
    return trained(run, make, x, x.sum((1, 2)), optimizer=keras.optimizers.SGD(0.01))


@case()
def preprocessing_layers(run: Run) -> dict[str, Any]:
    x, y = run.rows()

    def make() -> Any:
        normalize = keras.layers.Normalization()
        normalize.adapt(x)
        return stack((4,), normalize, keras.layers.Dense(1))

    return trained(run, make, x, y)


@case(apart=["weights", "history"])
def augmentation(run: Run) -> dict[str, Any]:
    """Each replica draws its own pictures."""
    x = run.rng().normal(size=(21, 6, 6, 1)).astype("float32")
    layers = keras.layers
    with run.scope():
        model = compiled(
            stack(
                (6, 6, 1),
                layers.RandomFlip(seed=2),
                layers.RandomTranslation(0.2, 0.2, seed=3),
                layers.Flatten(),
                layers.Dense(1),
            )
        )
    history = model.fit(x, x.sum((1, 2)), **FIT)
    return outcome(model, history, finite=bool(np.isfinite(model.get_weights()[-1]).all()))


@case()
def lora(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = dense()
        model.layers[0].enable_lora(2, a_initializer=keras.initializers.GlorotUniform(3))
        compiled(model)
    return outcome(model, model.fit(x, y, **FIT))


# Losses that layers add


@case()
def weight_regularizers(run: Run) -> dict[str, Any]:
    make = lambda: dense(kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02), bias_regularizer="l2")  # noqa: E731
    return trained(run, make, *run.rows())


@case()
def activity_regularizer(run: Run) -> dict[str, Any]:
    return trained(run, lambda: dense(activity_regularizer=keras.regularizers.L2(0.01)), *run.rows())


class Adds(keras.layers.Layer):
    """Adds a loss: the mean or the sum of squares of what passes."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, x: Any) -> Any:
        squares = keras.ops.square(x)
        self.add_loss(0.01 * (keras.ops.mean(squares) if self.reduce == "mean" else keras.ops.sum(squares)))
        return x


@case()
def added_loss_of_means(run: Run) -> dict[str, Any]:
    return trained(
        run, lambda: stack((4,), keras.layers.Dense(4), Adds("mean"), keras.layers.Dense(1)), *run.rows()
    )


@case()
def added_loss_of_sums(run: Run) -> dict[str, Any]:
    return trained(
        run, lambda: stack((4,), keras.layers.Dense(4), Adds("sum"), keras.layers.Dense(1)), *run.rows()
    )


# Weights that the forward pass moves


class Counter(keras.layers.Layer):
    """Keeps numbers as weights that no gradient moves."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def build(self, shape: Any) -> None:
        whole = "float32" if self.what in ("rows_float", "average", "largest") else "int32"
        self.kept = self.add_weight(name="kept", shape=(), initializer="zeros", trainable=False, dtype=whole)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            ops, rows = keras.ops, keras.ops.shape(x)[0]
            if self.what == "calls":
                self.kept.assign_add(1)
            elif self.what.startswith("rows"):
                self.kept.assign_add(ops.cast(rows, self.kept.dtype))
            elif self.what == "largest":
                self.kept.assign(ops.maximum(self.kept, ops.max(x)))
            else:
                self.kept.assign(0.9 * self.kept + 0.1 * ops.mean(x))
        return x


def counting(run: Run, what: str) -> dict[str, Any]:
    x, y = run.rows(40)
    with run.scope():
        model = compiled(stack((4,), Counter(what), keras.layers.Dense(1)))
    return outcome(model, model.fit(x, y, **FIT))


@case()
def weight_that_counts_calls(run: Run) -> dict[str, Any]:
    return counting(run, "calls")


@case()
def weight_that_counts_rows(run: Run) -> dict[str, Any]:
    return counting(run, "rows")


@case()
def weight_that_counts_rows_in_float(run: Run) -> dict[str, Any]:
    return counting(run, "rows_float")


@case()
def weight_that_keeps_the_largest(run: Run) -> dict[str, Any]:
    return counting(run, "largest")


@case()
def weight_that_averages(run: Run) -> dict[str, Any]:
    return counting(run, "average")
