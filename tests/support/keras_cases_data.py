"""Cases: every kind of data that `fit`, `evaluate` and `predict` take."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_case_tools import (
    BATCH,
    FIT,
    Batches,
    Limit,
    Run,
    SumOf,
    case,
    compiled,
    dense,
    outcome,
    regress,
    sparse_loss,
)

QUIET: dict[str, Any] = {"epochs": 2, "verbose": 0}


def fit_on(run: Run, data: Any, *, fit: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Trains the small network on data that comes in batches."""
    with run.scope():
        model = compiled(dense(), metrics=[SumOf()])
    history = model.fit(data, **{**QUIET, **(fit or {})}, callbacks=[Limit()])
    return outcome(model, history, **more)


def tf_data(run: Run, count: int = 37) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(run.rows(count))


class Sequence(keras.utils.PyDataset):
    """Batches by number, which tells what it hears."""

    def __init__(self, arrays: tuple[np.ndarray, ...], *, endless: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.batches = Batches(arrays)
        self.endless = endless
        self.begun = self.ended = 0

    @property
    def num_batches(self) -> int | None:
        return None if self.endless else len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.ended += 1


class Shuffled(Sequence):
    """Draws a new order of the rows at the end of each epoch."""

    def __init__(self, arrays: tuple[np.ndarray, ...], rng: np.random.Generator) -> None:
        super().__init__(arrays)
        self.rng = rng

    def on_epoch_end(self) -> None:
        order = self.rng.permutation(len(self.batches.arrays[0]))
        self.batches.arrays = tuple(array[order] for array in self.batches.arrays)


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
    """Keras refuses both together."""
    x, _ = run.rows()
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss())
    try:
        model.fit(x, run.labels(), class_weight={0: 1.0, 1: 1.0, 2: 2.0}, sample_weight=np.ones(37), **FIT)
    except ValueError as error:
        return {"error": type(error).__name__}
    return {"error": "none"}


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

            def compute_output_shape(self, a: Any, b: Any = None) -> Any:
                return a

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


@case()
def shuffled_arrays(run: Run) -> dict[str, Any]:
    """Without learning, the loss of the epoch tells of lost rows, and its course of the order."""
    x, y = run.rows(40)
    courses: list[list[float]] = []

    class Course(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            courses.append([])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            courses[-1].append(float(logs["loss"]))

    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "callbacks": [Course()]}
    first = model.fit(x, y, **options)
    second = model.fit(x, y, **options)
    distinct = len({tuple(f"{value:.6f}" for value in course[:-1]) for course in courses})
    return outcome(model, first, second=second.history, orders=distinct)


@case()
def shuffled_in_order_of_the_seed(run: Run) -> dict[str, Any]:
    """The same seed gives the same order, another one another."""
    x, y = run.rows(40)

    def train(seed: int) -> float:
        keras.utils.set_random_seed(seed)
        with run.scope():
            model = compiled(dense(kernel_initializer="ones"), keras.optimizers.SGD(0.1))
            model.layers[0].kernel.assign(np.ones((4, 5)) / 5)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        return float(np.sum([np.abs(w).sum() for w in model.get_weights()]))

    one, again, other = train(1), train(1), train(2)
    return {"same": abs(one - again) < 1e-5, "other": abs(one - other) > 1e-5}


# tf.data


@case(backends=["tensorflow"])
def tf_data_of_known_length(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).batch(BATCH), fit={"validation_data": tf_data(run, 19).batch(4)})


@case(backends=["tensorflow"])
def tf_data_with_weights(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    weight = np.linspace(0, 2, 37, dtype="f4")
    return fit_on(run, tf.data.Dataset.from_tensor_slices((*run.rows(), weight)).batch(BATCH))


@case(backends=["tensorflow"])
def tf_data_of_unknown_length(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).filter(lambda x, y: y[0] > -0.5).batch(BATCH))


@case(backends=["tensorflow"])
def tf_data_of_unknown_length_with_steps(run: Run) -> dict[str, Any]:
    data = tf_data(run).filter(lambda x, y: y[0] > -2).batch(BATCH).repeat()
    return fit_on(run, data, fit={"steps_per_epoch": 3})


@case(backends=["tensorflow"])
def tf_data_endless_with_steps(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).batch(BATCH).repeat(), fit={"steps_per_epoch": 3})


@case(backends=["tensorflow"])
def tf_data_endless_validation(run: Run) -> dict[str, Any]:
    held_out = tf_data(run, 20).batch(BATCH).repeat()
    return fit_on(run, tf_data(run).batch(BATCH), fit={"validation_data": held_out, "validation_steps": 2})


@case(backends=["tensorflow"])
def tf_data_steps_fewer_than_batches(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).batch(BATCH), fit={"steps_per_epoch": 2})


@case(backends=["tensorflow"])
def tf_data_steps_more_than_batches(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).batch(BATCH), fit={"steps_per_epoch": 9})


@case(backends=["tensorflow"], free=["weights"])
def tf_data_shuffled_without_a_seed(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    tf.random.set_seed(100 + run.index)
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    data = tf_data(run, 40).shuffle(40).batch(BATCH)
    return outcome(model, model.fit(data, **QUIET))


@case(backends=["tensorflow"])
def tf_data_shuffled_with_a_seed(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).shuffle(40, seed=3).batch(BATCH))


@case(backends=["tensorflow"])
def tf_data_of_dictionaries(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    x, y = run.rows()
    with run.scope():
        a = keras.Input((4,), name="a")
        model = compiled(
            keras.Model({"a": a}, {"out": keras.layers.Dense(1, name="out")(a)}), loss={"out": "mse"}
        )
    data = tf.data.Dataset.from_tensor_slices(({"a": x}, {"out": y})).batch(BATCH)
    predicted = model.predict(data.map(lambda x, y: x), verbose=0)
    return outcome(
        model, model.fit(data, **QUIET), predicted=predicted, evaluated=model.evaluate(data, verbose=0)
    )


@case(backends=["tensorflow"])
def tf_data_from_a_generator(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    x, y = run.rows()
    data = tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=(tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32)),
    )
    return fit_on(run, data.batch(BATCH).prefetch(2))


@case(backends=["tensorflow"])
def strings(run: Run) -> dict[str, Any]:
    words = np.array(["red", "green", "blue", "teal"])
    x = words[run.rng().integers(0, 4, (37, 1))].astype(object)
    _, y = run.rows()
    import tensorflow as tf

    with run.scope():
        inputs = keras.Input((1,), dtype="string")
        keys = keras.layers.StringLookup(vocabulary=words.tolist())(inputs)
        embedded = keras.layers.Flatten()(keras.layers.Embedding(6, 3)(keys))
        model = compiled(keras.Model(inputs, keras.layers.Dense(1)(embedded)))
    data = tf.data.Dataset.from_tensor_slices((x.astype(str), y)).batch(BATCH)
    return outcome(model, model.fit(data, **QUIET), predicted=model.predict(data, verbose=0))


@case(backends=["tensorflow"])
def strings_in_tensors(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    texts = [f"{a} {b}" for a in ("good", "bad", "ok") for b in ("film", "book", "meal", "plot")] * 3
    _, y = run.rows(36)
    with run.scope():
        vectorize = keras.layers.TextVectorization(8, output_sequence_length=3)
        vectorize.adapt(texts)
        model = compiled(
            keras.Sequential(
                [
                    keras.Input((), dtype="string"),
                    vectorize,
                    keras.layers.Embedding(8, 3),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(1),
                ]
            )
        )
    x = tf.constant(texts)
    return outcome(model, model.fit(x, y, **FIT), predicted=model.predict(x, verbose=0))


@case(backends=["tensorflow"])
def ragged_batches(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    rng = run.rng()
    x = tf.ragged.constant([rng.integers(1, 9, 1 + index % 4).tolist() for index in range(36)])
    _, y = run.rows(36)

    class Average(keras.layers.Layer):
        def call(self, values: Any) -> Any:
            table = tf.cast(values, tf.float32)
            return tf.reduce_mean(table, axis=1)[:, None]

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], 1)

    with run.scope():
        model = compiled(keras.Sequential([Average(), keras.layers.Dense(1)]), keras.optimizers.SGD(0.01))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    return outcome(model, model.fit(data, **QUIET))


# PyDataset and generators


@case()
def py_dataset(run: Run) -> dict[str, Any]:
    held_out = Sequence(run.rows(19))
    return fit_on(run, Sequence(run.rows()), fit={"shuffle": False, "validation_data": held_out})


@case()
def py_dataset_hears_of_epochs(run: Run) -> dict[str, Any]:
    data = Sequence(run.rows())
    result = fit_on(run, data, fit={"shuffle": False})
    return {**result, "begun": data.begun, "ended": data.ended}


@case()
def py_dataset_that_shuffles_itself(run: Run) -> dict[str, Any]:
    return fit_on(run, Shuffled(run.rows(40), np.random.default_rng(3)), fit={"shuffle": False, "epochs": 3})


@case(free=["weights"])
def py_dataset_that_shuffles_without_a_seed(run: Run) -> dict[str, Any]:
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    data = Shuffled(run.rows(40), np.random.default_rng(run.index))
    return outcome(model, model.fit(data, epochs=3, shuffle=False, verbose=0))


@case()
def py_dataset_with_workers(run: Run) -> dict[str, Any]:
    return fit_on(run, Sequence(run.rows(), workers=2, max_queue_size=3), fit={"shuffle": False})


@case()
def py_dataset_endless_with_steps(run: Run) -> dict[str, Any]:
    return fit_on(run, Sequence(run.rows(), endless=True), fit={"steps_per_epoch": 3, "shuffle": False})


@case()
def py_dataset_steps_fewer_than_batches(run: Run) -> dict[str, Any]:
    return fit_on(run, Sequence(run.rows()), fit={"steps_per_epoch": 2, "shuffle": False})


@case()
def py_dataset_validation_steps(run: Run) -> dict[str, Any]:
    held_out = {"validation_data": Sequence(run.rows(29)), "validation_steps": 2}
    return fit_on(run, Sequence(run.rows()), fit={"shuffle": False, **held_out})


@case()
def py_dataset_with_class_weights(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    with run.scope():
        model = compiled(dense(3), loss=sparse_loss(), metrics=["accuracy"])
    data = Sequence((x, run.labels()))
    return outcome(model, model.fit(data, class_weight={0: 0.5, 1: 1.0, 2: 4.0}, shuffle=False, **QUIET))


@case()
def py_dataset_shuffled_by_fit(run: Run) -> dict[str, Any]:
    """`fit(shuffle=True)`, the default, takes the batches in another order: each one once."""
    data = Sequence(run.rows(40))
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    return outcome(model, model.fit(data, **QUIET))


@case()
def generator_of_one_epoch(run: Run) -> dict[str, Any]:
    return fit_on(run, Batches(run.rows()).once(), fit={"epochs": 1})


@case()
def generator_endless_with_steps(run: Run) -> dict[str, Any]:
    return fit_on(run, Batches(run.rows()).forever(), fit={"steps_per_epoch": 3})


@case()
def generator_for_validation(run: Run) -> dict[str, Any]:
    held_out = {"validation_data": Batches(run.rows(20)).forever(), "validation_steps": 2}
    return fit_on(run, Batches(run.rows()).forever(), fit={"steps_per_epoch": 3, **held_out})


@case()
def generator_for_evaluate_and_predict(run: Run) -> dict[str, Any]:
    model, history = regress(run)
    x, _ = run.rows()
    evaluated = model.evaluate(Batches(run.rows()).once(), verbose=0)
    predicted = model.predict(Batches((x,)).forever(), steps=3, verbose=0, callbacks=[Limit()])
    return outcome(model, history, evaluated=evaluated, predicted=predicted)


# PyTorch's loaders


def loader(run: Run, count: int = 37, **options: Any) -> Any:
    import torch

    data = torch.utils.data.TensorDataset(*(torch.from_numpy(part) for part in run.rows(count)))
    return torch.utils.data.DataLoader(data, batch_size=BATCH, **options)


@case(backends=["torch"])
def torch_loader(run: Run) -> dict[str, Any]:
    return fit_on(run, loader(run), fit={"validation_data": loader(run, 19)})


@case(backends=["torch"])
def torch_loader_shuffled_with_a_seed(run: Run) -> dict[str, Any]:
    import torch

    return fit_on(run, loader(run, shuffle=True, generator=torch.Generator().manual_seed(3)))


@case(backends=["torch"], free=["weights"])
def torch_loader_shuffled_without_a_seed(run: Run) -> dict[str, Any]:
    import torch

    torch.manual_seed(100 + run.index)
    with run.scope():
        model = compiled(dense(), keras.optimizers.SGD(0.0), metrics=[SumOf()])
    return outcome(model, model.fit(loader(run, 40, shuffle=True), **QUIET))


@case(backends=["torch"])
def torch_iterable_dataset(run: Run) -> dict[str, Any]:
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return zip(*run.rows(), strict=True)

    return fit_on(run, torch.utils.data.DataLoader(Stream(), batch_size=BATCH))


@case(backends=["torch"])
def torch_loader_with_steps(run: Run) -> dict[str, Any]:
    return fit_on(
        run,
        loader(run),
        fit={"steps_per_epoch": 3, "validation_data": loader(run, 30), "validation_steps": 2},
    )
