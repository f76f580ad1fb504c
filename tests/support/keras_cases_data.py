"""Cases: arrays, several inputs and outputs, weights of rows and classes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_case_tools import (
    BATCH,
    FIT,
    Run,
    SumOf,
    case,
    compiled,
    dense,
    outcome,
    regress,
    sparse_loss,
)

# Arrays


@case()
def arrays(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    model, history = regress(run, metrics=["mae", SumOf()])
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return outcome(model, history, evaluated=evaluated, predicted=model.predict(x, verbose=0))


@case()
def arrays_with_the_defaults_of_compile(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"])
    return outcome(model, model.fit(x, y, **FIT), evaluated=model.evaluate(x, y, verbose=0))


@case()
def arrays_of_float64(run: Run) -> dict[str, Any]:
    x, y = (part.astype("float64") for part in run.rows())
    with run.scope():
        model = compiled(dense(), metrics=["mae"])
    history = model.fit(x, y, validation_data=(x, y), sample_weight=np.ones(37), **FIT)
    evaluated = model.evaluate(x, y, verbose=0)
    single = model.train_on_batch(x[:8], y[:8])
    return outcome(model, history, evaluated=evaluated, single=single, predicted=model.predict(x, verbose=0))


@case()
def arrays_of_float64_through_an_own_layer(run: Run) -> dict[str, Any]:
    """Keras casts arrays where they enter the trainer; a layer without a cast sees which dtype they have."""
    x, y = (part.astype("float64") for part in run.rows())
    with run.scope():
        inputs = keras.Input((4,))
        scaled = keras.ops.matmul(inputs, keras.ops.ones((4, 4), "float32"))
        model = compiled(keras.Model(inputs, keras.layers.Dense(1)(scaled)), keras.optimizers.SGD(0.01))
    return outcome(model, model.fit(x, y, **FIT), predicted=model.predict(x, verbose=0))


@case()
def arrays_of_integers(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    x = (x * 3).astype("int64")
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.01))
    return outcome(model, model.fit(x, y, **FIT), predicted=model.predict(x, verbose=0))


@case()
def arrays_of_booleans(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), loss="binary_crossentropy")
    return outcome(model, model.fit(x > 0, y > 0, **FIT))


@case()
def arrays_without_a_batch_size(run: Run) -> dict[str, Any]:
    x, y = run.rows(70)
    with run.scope():
        model = compiled(dense())
    return outcome(model, model.fit(x, y, epochs=2, shuffle=False, verbose=0))


@case()
def tensors_of_the_backend(run: Run) -> dict[str, Any]:
    x, y = (keras.ops.convert_to_tensor(part) for part in run.rows())
    with run.scope():
        model = compiled(dense())
    history = model.fit(x, y, **FIT)
    return outcome(model, history, evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


@case()
def one_row(run: Run) -> dict[str, Any]:
    x, y = run.rows(1)
    with run.scope():
        model = compiled(dense())
    return outcome(model, model.fit(x, y, **FIT), predicted=model.predict(x, verbose=0))


@case()
def batch_of_one_row(run: Run) -> dict[str, Any]:
    """Batches with fewer rows than replicas."""
    model, history = regress(run, {"batch_size": 1})
    return outcome(model, history)


@case()
def last_batch_of_one_row(run: Run) -> dict[str, Any]:
    x, y = run.rows(33)
    with run.scope():
        model = compiled(dense(), metrics=[SumOf()])
    return outcome(model, model.fit(x, y, **FIT), evaluated=model.evaluate(x, y, batch_size=16, verbose=0))


@case()
def batch_larger_than_the_data(run: Run) -> dict[str, Any]:
    model, history = regress(run, {"batch_size": 100})
    return outcome(model, history)


@case()
def inputs_without_labels(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    with run.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(2, activity_regularizer=None)(inputs)
        model = keras.Model(inputs, keras.layers.Dense(4)(hidden))

        class Autoencoder(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            def call(self, x: Any) -> Any:
                return self.net(x)

            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                return keras.ops.mean(keras.ops.square(x - y_pred))

        auto = compiled(Autoencoder(), loss=None)
    return outcome(auto, auto.fit(x, **FIT))


@case()
def inputs_by_name(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        joined = keras.layers.Concatenate()([a, keras.layers.Dense(3)(b)])
        model = compiled(keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(joined)))
    data = {"b": x[:, 2:], "a": x[:, :2], "unused": x}
    data.pop("unused")
    return outcome(model, model.fit(data, y, **FIT), predicted=model.predict(data, verbose=0))


def two_outputs() -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(4, "relu")(inputs)
    outputs = {"u": keras.layers.Dense(3, name="u")(hidden), "v": keras.layers.Dense(1, name="v")(hidden)}
    return keras.Model(inputs, outputs)


@case()
def outputs_by_name(run: Run) -> dict[str, Any]:
    x, v = run.rows()
    y = {"u": run.labels(), "v": v}
    with run.scope():
        model = compiled(
            two_outputs(),
            loss={"u": sparse_loss(), "v": "mse"},
            loss_weights={"u": 0.3, "v": 2.0},
            metrics={"u": ["accuracy"], "v": ["mae", "mse"]},
        )
    history = model.fit(x, y, validation_data=(x[:9], {"u": y["u"][:9], "v": v[:9]}), **FIT)
    evaluated = model.evaluate(x, y, return_dict=True, verbose=0)
    return outcome(model, history, evaluated=evaluated, predicted=model.predict(x, verbose=0))


@case()
def outputs_in_a_list(run: Run) -> dict[str, Any]:
    x, v = run.rows()
    with run.scope():
        inputs = keras.Input((4,))
        outputs = [keras.layers.Dense(3, name="u")(inputs), keras.layers.Dense(1, name="v")(inputs)]
        model = compiled(
            keras.Model(inputs, outputs), loss=[sparse_loss(), "mae"], metrics=[["accuracy"], ["mse"]]
        )
    history = model.fit(x, [run.labels(), v], **FIT)
    return outcome(model, history, predicted=model.predict(x, verbose=0))


@case()
def output_without_a_loss(run: Run) -> dict[str, Any]:
    x, v = run.rows()
    with run.scope():
        model = compiled(two_outputs(), loss={"u": None, "v": "mse"})
    return outcome(model, model.fit(x, {"u": run.labels(), "v": v}, **FIT))


@case()
def sample_weights(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    weight = run.rng(2).uniform(0, 3, 37).astype("float32")
    with run.scope():
        model = compiled(dense(), metrics=["mse"], weighted_metrics=["mae"])
    history = model.fit(x, y, sample_weight=weight, validation_data=(x, y, weight), **FIT)
    return outcome(model, history, evaluated=model.evaluate(x, y, sample_weight=weight, verbose=0))


@case()
def sample_weights_of_zero(run: Run) -> dict[str, Any]:
    """In some batches the first half of the rows has no weight at all."""
    x, y = run.rows()
    weight = np.tile([0.0, 0, 0, 0, 1, 2, 3, 4], 5)[:37].astype("float32")
    with run.scope():
        model = compiled(dense(), weighted_metrics=["mae"])
    return outcome(model, model.fit(x, y, sample_weight=weight, **FIT))


@case()
def sample_weights_by_output(run: Run) -> dict[str, Any]:
    x, v = run.rows()
    weight = {"u": np.linspace(0, 1, 37, dtype="f4"), "v": np.linspace(1, 0, 37, dtype="f4")}
    with run.scope():
        model = compiled(two_outputs(), loss={"u": sparse_loss(), "v": "mse"})
    return outcome(model, model.fit(x, {"u": run.labels(), "v": v}, sample_weight=weight, **FIT))


@case()
def sample_weights_by_time_step(run: Run) -> dict[str, Any]:
    x = run.rng().normal(size=(37, 5, 3)).astype("float32")
    weight = run.rng(2).uniform(0, 1, (37, 5)).astype("float32")
    with run.scope():
        model = compiled(
            keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(1)]), weighted_metrics=["mae"]
        )
    return outcome(model, model.fit(x, x.sum(2, keepdims=True), sample_weight=weight, **FIT))


@case()
def class_weights(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss(), metrics=["accuracy"])
    return outcome(model, model.fit(x, run.labels(), class_weight={0: 0.5, 1: 1.0, 2: 4.0}, **FIT))


@case()
def class_weights_of_one_hot_labels(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    with run.scope():
        model = compiled(dense(3), loss=loss, metrics=["accuracy"])
    y = np.eye(3, dtype="float32")[run.labels()]
    return outcome(model, model.fit(x, y, class_weight={0: 0.5, 1: 1.0, 2: 4.0}, **FIT))


@case()
def class_weights_beside_sample_weights(run: Run) -> dict[str, Any]:
    """Keras refuses both together, and so does insitu, each by an error of its own."""
    x, _ = run.rows()
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss())
    try:
        model.fit(x, run.labels(), class_weight={0: 1.0, 1: 1.0, 2: 2.0}, sample_weight=np.ones(37), **FIT)
    except Exception:
        return {"refused": True}
    return {"refused": False}


@case()
def optional_inputs_of_none(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():

        class Optional(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.out = keras.layers.Dense(1)

            def call(self, inputs: Any) -> Any:
                a, b = inputs["a"], inputs["b"]
                return self.out(a if b is None else a + b)

        model = compiled(Optional())
    history = model.fit({"a": x, "b": None}, y, **FIT)
    return outcome(model, history, predicted=model.predict({"a": x, "b": None}, verbose=0))


@case()
def optional_inputs_of_a_functional_model(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b", optional=True)

        class Add(keras.layers.Layer):
            def call(self, a: Any, b: Any = None) -> Any:
                return a if b is None else a + b

            def compute_output_shape(self, a_shape: Any, b_shape: Any = None) -> Any:
                return a_shape

        model = compiled(keras.Model([a, b], keras.layers.Dense(1)(Add()(a, b))))
    return outcome(model, model.fit([x, None], y, **FIT))


@case(free=["weights"])
def arrays_that_each_process_permutes(run: Run) -> dict[str, Any]:
    """Each process draws its own order. The order of rows is free; that each enters once isn't."""
    x, y = run.rows(40)
    order = np.random.default_rng(run.index).permutation(40)
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    return outcome(model, model.fit(x[order], y[order], **FIT))


def orders_of_epochs(model: Any, x: Any, y: Any, **options: Any) -> list[list[float]]:
    """Trains on shuffled arrays; returns the loss of each batch, by epoch. Without learning, it tells of the
    order: insitu draws one of its own, so that numbers of plain Keras can't be compared."""
    courses: list[list[float]] = []

    class Course(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            courses.append([])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            courses[-1].append(float(logs["loss"]))

    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Course()], **options)
    return courses


def differ(one: list[float], other: list[float]) -> bool:
    # The last is the loss of all rows.
    return bool(np.abs(np.subtract(one[:-1], other[:-1])).max() > 1e-5)


def frozen(run: Run) -> Any:
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
    return model


@case()
def shuffled_arrays(run: Run) -> dict[str, Any]:
    """Each row enters once an epoch, and fits have orders of their own.

    The seed is set anew before the second fit: on TensorFlow plain Keras repeats one order for each epoch of
    each fit as long as the seed is the same.
    """
    x, y = run.rows(40)
    model = frozen(run)
    first = orders_of_epochs(model, x, y, epochs=2)
    history = model.history.history
    keras.utils.set_random_seed(11)
    second = orders_of_epochs(model, x, y, epochs=2)
    fits_differ = differ(first[0], second[0])
    return outcome(model, history, second=model.history.history, fits_differ=fits_differ)


@case()
def shuffled_in_order_of_the_seed(run: Run) -> dict[str, Any]:
    """The same seed gives the same order, another one another."""
    x, y = run.rows(40)

    def order(seed: int) -> list[float]:
        keras.utils.set_random_seed(seed)
        return orders_of_epochs(frozen(run), x, y, epochs=1)[0]

    one, again, other = order(1), order(1), order(2)
    return {"same": not differ(one, again), "other": differ(one, other)}


@case()
def shuffled_within_batches(run: Run) -> dict[str, Any]:
    """Each batch has the rows that it has without a shuffle."""
    x, y = run.rows(40)
    return {"courses": orders_of_epochs(frozen(run), x, y, epochs=2, shuffle="batch")}
