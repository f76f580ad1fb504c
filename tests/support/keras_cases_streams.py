"""Cases: data that comes in batches."""

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


def fit_on(
    run: Run, data: Any, *, fit: dict[str, Any] | None = None, make: Any = dense, **more: Any
) -> dict[str, Any]:
    """Trains a small network on data that comes in batches."""
    with run.scope():
        model = compiled(make(), metrics=[SumOf()])
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


# tf.data


@case(backends=["tensorflow"])
def tf_data_of_known_length(run: Run) -> dict[str, Any]:
    return fit_on(run, tf_data(run).batch(BATCH), fit={"validation_data": tf_data(run, 19).batch(4)})


@case(backends=["tensorflow"])
def tf_data_with_weights(run: Run) -> dict[str, Any]:
    import tensorflow as tf

    weight = np.linspace(0, 2, 37, dtype="f4")
    return fit_on(run, tf.data.Dataset.from_tensor_slices((*run.rows(), weight)).batch(BATCH))


@case(backends=["tensorflow"], apart=["iterations"])
def tf_data_of_unknown_length(run: Run) -> dict[str, Any]:
    """Where the length is unknown, plain Keras on TensorFlow counts one update too many in each epoch."""
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


@case(backends=["tensorflow"], apart=["iterations"])
def tf_data_from_a_generator(run: Run) -> dict[str, Any]:
    """Where the length is unknown, plain Keras on TensorFlow counts one update too many in each epoch."""
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
    """The model is built before: on JAX and PyTorch plain Keras builds it by an iteration of the data, and
    reads what the workers have read by then a second time in the first epoch."""
    with run.scope():
        model = compiled(dense(), metrics=[SumOf()])
    model.evaluate(*run.rows(8), verbose=0)
    data = Sequence(run.rows(), workers=2, max_queue_size=3)
    return outcome(model, model.fit(data, shuffle=False, **QUIET))


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


@case(apart=["iterations"])
def generator_of_one_epoch(run: Run) -> dict[str, Any]:
    """Where the length is unknown, plain Keras on TensorFlow counts one update too many."""
    return fit_on(run, Batches(run.rows()).once(), fit={"epochs": 1})


@case()
def generator_endless_with_steps(run: Run) -> dict[str, Any]:
    return fit_on(run, Batches(run.rows()).forever(), fit={"steps_per_epoch": 3})


@case()
def generator_for_validation(run: Run) -> dict[str, Any]:
    held_out = {"validation_data": Batches(run.rows(20)).forever(), "validation_steps": 2}
    return fit_on(run, Batches(run.rows()).forever(), fit={"steps_per_epoch": 3, **held_out})


class Turned(keras.Model):
    """Multiplies rows with an array that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(keras.ops.matmul(inputs["rows"], inputs["shared"]))


@case(apart=["iterations"])
def array_that_all_rows_share(run: Run) -> dict[str, Any]:
    """A batch may hold an array that has no rows."""
    shared = np.eye(4, dtype="float32")[::-1].copy()
    batches = (({"rows": x, "shared": shared}, y) for x, y in Batches(run.rows()).once())
    return fit_on(run, batches, fit={"epochs": 1}, make=Turned)


@case()
def generator_for_evaluate_and_predict(run: Run) -> dict[str, Any]:
    model, history = regress(run)
    x, _ = run.rows()
    evaluated = model.evaluate(Batches(run.rows()).once(), verbose=0)
    predicted = model.predict(Batches((x,)).forever(), steps=3, verbose=0, callbacks=[Limit()])
    return outcome(model, history, evaluated=evaluated, predicted=predicted)


@case()
def batches_of_many_lengths(run: Run) -> dict[str, Any]:
    x, y = run.rows(40)
    lengths = (3, 7, 5, 3)
    batches = [
        (
            np.repeat(x[i : i + 10, None], n, axis=1) * np.arange(1, n + 1, dtype="float32")[:, None] / n,
            y[i : i + 10],
        )
        for i, n in zip(range(0, 40, 10), lengths, strict=True)
    ]
    with run.scope():
        inputs = keras.Input((None, x.shape[1]))
        pooled = keras.layers.GlobalAveragePooling1D()(inputs)
        model = compiled(keras.Model(inputs, keras.layers.Dense(1)(pooled)), metrics=[SumOf()])
    history = model.fit(
        (batch for batch in batches * 2), **{**QUIET, "steps_per_epoch": 4}, callbacks=[Limit()]
    )
    evaluated = model.evaluate((batch for batch in batches), verbose=0)
    predicted = model.predict((batch[:1] for batch in batches), verbose=0)
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
