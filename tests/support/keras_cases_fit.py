"""Cases: arguments of `fit`, `evaluate` and `predict`, single batches, callbacks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_case_tools import (
    BATCH,
    FIT,
    Counts,
    Limit,
    Run,
    SumOf,
    case,
    compiled,
    dense,
    numbers,
    outcome,
    regress,
    weights,
)

# Validation


@case()
def validation_data(run: Run) -> dict[str, Any]:
    x, y = run.rows(50)
    model, history = regress(run, {"validation_data": (x[37:], y[37:])}, metrics=["mae", SumOf()])
    return outcome(model, history)


@case()
def validation_split(run: Run) -> dict[str, Any]:
    model, history = regress(run, {"validation_split": 0.3}, metrics=["mae", SumOf()])
    return outcome(model, history)


@case()
def validation_weights(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    weight = np.linspace(0, 2, 37, dtype="f4")
    model, history = regress(run, {"validation_data": (x, y, weight)}, weighted_metrics=["mae"])
    return outcome(model, history)


@case()
def validation_steps(run: Run) -> dict[str, Any]:
    x, y = run.rows(50)
    counts = Counts()
    options = {"validation_data": (x, y), "validation_steps": 2, "callbacks": [counts, Limit()]}
    model, history = regress(run, options, metrics=["mae"])
    return outcome(model, history, **counts.told())


@case()
def validation_steps_more_than_batches(run: Run) -> dict[str, Any]:
    x, y = run.rows(20)
    options = {"validation_data": (x, y), "validation_steps": 9, "callbacks": [Limit()]}
    model, history = regress(run, options, metrics=["mae"])
    return outcome(model, history)


@case()
def validation_freq(run: Run) -> dict[str, Any]:
    options = {"validation_data": run.rows(20), "validation_freq": 2, "epochs": 5}
    model, history = regress(run, options)
    return outcome(model, history)


@case()
def validation_freq_by_epoch(run: Run) -> dict[str, Any]:
    options = {"validation_data": run.rows(20), "validation_freq": [1, 4], "epochs": 4}
    model, history = regress(run, options)
    return outcome(model, history)


@case()
def validation_batch_size(run: Run) -> dict[str, Any]:
    counts = Counts()
    options = {"validation_data": run.rows(20), "validation_batch_size": 3, "callbacks": [counts]}
    model, history = regress(run, options, metrics=["mae"])
    return outcome(model, history, **counts.told())


# How many steps


@case()
def steps_per_epoch_fewer_than_batches(run: Run) -> dict[str, Any]:
    counts = Counts()
    model, history = regress(
        run, {"steps_per_epoch": 3, "epochs": 4, "callbacks": [counts]}, metrics=[SumOf()]
    )
    return outcome(model, history, **counts.told())


@case()
def steps_per_epoch_equal_to_batches(run: Run) -> dict[str, Any]:
    model, history = regress(run, {"steps_per_epoch": 5}, metrics=[SumOf()])
    return outcome(model, history)


@case()
def steps_per_epoch_more_than_batches(run: Run) -> dict[str, Any]:
    """Keras warns that the data has run out, and ends the epoch."""
    counts = Counts()
    options = {"steps_per_epoch": 9, "epochs": 3, "callbacks": [counts, Limit()]}
    model, history = regress(run, options, metrics=[SumOf()])
    return outcome(model, history, **counts.told())


@case()
def steps_per_epoch_with_validation(run: Run) -> dict[str, Any]:
    options = {"steps_per_epoch": 2, "validation_data": run.rows(20), "validation_steps": 1, "epochs": 3}
    model, history = regress(run, {**options, "callbacks": [Limit()]}, metrics=["mae"])
    return outcome(model, history)


@case(backends=["tensorflow", "jax"])
def steps_per_execution_that_divides(run: Run) -> dict[str, Any]:
    x, y = run.rows(48)
    with run.scope():
        model = compiled(dense(), steps_per_execution=3, metrics=[SumOf()])
    counts = Counts()
    history = model.fit(x, y, validation_data=(x, y), **FIT, callbacks=[counts])
    return outcome(model, history, **counts.told())


@case(backends=["tensorflow", "jax"])
def steps_per_execution_that_does_not_divide(run: Run) -> dict[str, Any]:
    x, y = run.rows(40)
    with run.scope():
        model = compiled(dense(), steps_per_execution=3, metrics=[SumOf()])
    counts = Counts()
    history = model.fit(x, y, validation_data=(x, y), **FIT, callbacks=[counts])
    return outcome(model, history, **counts.told())


@case(backends=["tensorflow", "jax"])
def steps_per_execution_with_steps_per_epoch(run: Run) -> dict[str, Any]:
    x, y = run.rows(64)
    with run.scope():
        model = compiled(dense(), steps_per_execution=2, metrics=[SumOf()])
    history = model.fit(x, y, steps_per_epoch=4, callbacks=[Limit()], **FIT)
    return outcome(model, history)


@case(backends=["tensorflow", "jax"])
def steps_per_execution_that_does_not_divide_steps_per_epoch(run: Run) -> dict[str, Any]:
    x, y = run.rows(40)
    with run.scope():
        model = compiled(dense(), steps_per_execution=2, metrics=[SumOf()])
    history = model.fit(x, y, steps_per_epoch=5, callbacks=[Limit()], **FIT)
    return outcome(model, history)


@case(backends=["tensorflow", "jax"])
def steps_per_execution_in_evaluate_and_predict(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), steps_per_execution=3, metrics=["mae", SumOf()])
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    return {"evaluated": evaluated, "predicted": predicted, "weights": weights(model)}


@case()
def initial_epoch(run: Run) -> dict[str, Any]:
    counts = Counts()
    model, history = regress(run, {"initial_epoch": 3, "epochs": 5, "callbacks": [counts]})
    return outcome(model, history, **counts.told())


@case()
def fit_twice(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    model, first = regress(run, optimizer=keras.optimizers.Adam(0.01))
    second = model.fit(x[:20], y[:20], **{**FIT, "epochs": 3, "initial_epoch": 1})
    return outcome(model, second, first=first.history)


@case()
def fit_on_data_of_another_length(run: Run) -> dict[str, Any]:
    """A model over sequences sees other lengths in its second fit."""
    x = run.rng().normal(size=(24, 6, 3)).astype("float32")
    with run.scope():
        pool = keras.layers.GlobalAveragePooling1D()
        model = compiled(keras.Sequential([keras.Input((None, 3)), pool, keras.layers.Dense(1)]))
    first = model.fit(x, x.sum((1, 2)), **FIT)
    second = model.fit(x[:, :4], x.sum((1, 2)), **FIT)
    return outcome(model, second, first=first.history)


@case()
def epochs_of_none(run: Run) -> dict[str, Any]:
    model, history = regress(run, {"epochs": 0})
    return {"history": history.history, "weights": weights(model)}


# evaluate and predict


@case()
def evaluate_before_any_fit(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), metrics=["mae", SumOf()])
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return outcome(model, model.fit(x, y, **FIT), evaluated=evaluated)


@case()
def evaluate_steps(run: Run) -> dict[str, Any]:
    model, history = regress(run, metrics=["mae", SumOf()])
    x, y = run.rows()
    few = model.evaluate(x, y, batch_size=4, steps=3, verbose=0, callbacks=[Limit()])
    counts = Counts()
    all_of_them = model.evaluate(x, y, batch_size=7, verbose=0, callbacks=[counts])
    return outcome(model, history, few=few, all=all_of_them, **counts.told())


@case()
def evaluate_weighted(run: Run) -> dict[str, Any]:
    model, history = regress(run, metrics=["mse"], weighted_metrics=["mae"])
    x, y = run.rows()
    weight = np.linspace(0, 1, 37, dtype="f4")
    return outcome(
        model, history, evaluated=model.evaluate(x, y, sample_weight=weight, batch_size=5, verbose=0)
    )


@case()
def predict_any_number_of_rows(run: Run) -> dict[str, Any]:
    model, history = regress(run)
    x, _ = run.rows()
    sizes = (1, 2, 3, 7, 8, 9, 33, 37)
    predicted = {str(size): model.predict(x[:size], batch_size=BATCH, verbose=0) for size in sizes}
    small = model.predict(x[:5], batch_size=2, verbose=0)
    return outcome(model, history, predicted=predicted, small=small)


@case()
def predict_before_any_fit(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]))
    predicted = model.predict(x, verbose=0)
    return outcome(model, model.fit(x, y, **FIT), predicted=predicted)


@case()
def predict_steps_and_callbacks(run: Run) -> dict[str, Any]:
    model, history = regress(run)
    x, _ = run.rows()
    counts = Counts()
    predicted = model.predict(x, batch_size=4, steps=3, verbose=0, callbacks=[counts, Limit()])
    return outcome(model, history, predicted=predicted, **counts.told())


@case()
def predict_draws_new_random_numbers(run: Run) -> dict[str, Any]:
    """Dropout at prediction (Monte Carlo): each call and each batch draws its own."""
    with run.scope():

        class Noisy(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.drop = keras.layers.Dropout(0.5, seed=4)
                self.out = keras.layers.Dense(1)

            def call(self, x: Any) -> Any:
                return self.out(self.drop(x, training=True))

        model = compiled(Noisy())
    ones = np.ones((16, 4), "float32")
    first = model.predict(ones, batch_size=BATCH, verbose=0)
    second = model.predict(ones, batch_size=BATCH, verbose=0)
    return {
        "calls_differ": bool(np.abs(first - second).max() > 1e-3),
        "batches_differ": bool(np.abs(first[:BATCH] - first[BATCH:]).max() > 1e-3),
        "rows_differ": len(np.unique(first.round(4))) > 2,
    }


# Single batches


@case()
def train_on_batch(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), metrics=["mae"])
    logs = [model.train_on_batch(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16, 24)]
    named = model.train_on_batch(x[:5], y[:5], sample_weight=np.arange(5.0, dtype="f4"), return_dict=True)
    return outcome(model, logs=logs, named=named)


@case()
def train_on_batch_with_class_weights(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    with run.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = compiled(dense(3), loss=loss)
    y = run.labels()
    logs = [model.train_on_batch(x[:9], y[:9], class_weight={0: 1.0, 1: 2.0, 2: 3.0}) for _ in range(3)]
    return outcome(model, logs=logs)


@case()
def metrics_of_single_batches(run: Run) -> dict[str, Any]:
    """Metrics continue until they are reset."""
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), metrics=["mae", SumOf()])
    first = model.train_on_batch(x[:8], y[:8])
    going_on = model.train_on_batch(x[8:16], y[8:16])
    model.reset_metrics()
    anew = model.train_on_batch(x[16:24], y[16:24])
    model.reset_metrics()
    tested = [model.test_on_batch(x[i : i + 9], y[i : i + 9], return_dict=True) for i in (0, 9, 18)]
    held = {name: numbers(value) for name, value in model.get_metrics_result().items()}
    logs = {"first": first, "going_on": going_on, "anew": anew, "tested": tested, "held": held}
    return outcome(model, **logs, predicted=model.predict_on_batch(x[:7]))


@case()
def single_batches_of_many_sizes(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), metrics=["mae"])
    logs = [model.train_on_batch(x[:size], y[:size]) for size in (8, 5, 2, 13)]
    tested = [model.test_on_batch(x[:size], y[:size]) for size in (1, 3)]
    return outcome(model, logs=logs, tested=tested)


@case()
def single_batches_after_a_fit(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    model, history = regress(run, metrics=["mae"])
    single = model.train_on_batch(x[:8], y[:8])
    return outcome(model, model.fit(x, y, **FIT), first=history.history, single=single)
