"""Cases: steps, losses, metrics and loops of the user's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_case_tools import BATCH, FIT, Run, case, compiled, dense, numbers, outcome, regress

ops = keras.ops


class Stepping(keras.Model):
    """A model whose train_step is written out for each backend, with places to change it."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(width, "tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x))

    def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
        return self.compute_loss(x, y, y_pred)

    def changed(self, gradients: list[Any]) -> list[Any]:
        return gradients

    def after(self, values: list[Any]) -> list[Any] | None:
        """Values for the trainable variables after their update, or None."""
        return None

    def train_step(self, *arguments: Any) -> Any:
        step = {"tensorflow": self._on_tensorflow, "jax": self._on_jax, "torch": self._on_torch}
        return step[keras.backend.backend()](*arguments)

    def _on_tensorflow(self, data: Any) -> Any:
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = self.changed(tape.gradient(loss, [v.value for v in variables]))
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self._put(variables)
        return {"loss": loss}

    def _put(self, variables: Any) -> None:
        values = self.after([v.value for v in variables])
        for variable, value in zip(variables, values or (), strict=bool(values)):
            variable.assign(value)

    def _on_jax(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data

        def loss_of(values: Any) -> Any:
            y_pred, moved = self.stateless_call(values, others, x, training=True)
            return self.loss_of(x, y, y_pred), moved

        (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        gradients = self.changed(gradients)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        trainable = self.after(list(trainable)) or trainable
        return {"loss": loss}, (trainable, moved, optimizer, metrics)

    def _on_torch(self, data: Any) -> Any:
        import torch

        x, y = data
        self.zero_grad()
        loss = self.loss_of(x, y, self(x, training=True))
        loss.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            gradients = self.changed([v.value.grad for v in variables])
            self.optimizer.apply(gradients, variables)
            self._put(variables)
        return {"loss": loss.detach()}


def stepped(run: Run, kind: Any, **compile_options: Any) -> dict[str, Any]:
    x, y = run.rows(40)
    with run.scope():
        model = compiled(kind(), **compile_options)
    history = model.fit(x, y, **FIT)
    return outcome(model, history, predicted=model.predict(x, verbose=0))


@case()
def own_train_step(run: Run) -> dict[str, Any]:
    return stepped(run, Stepping)


@case()
def arrays_of_float64_in_an_own_step(run: Run) -> dict[str, Any]:
    """Keras casts arrays to its float type before a step sees them."""

    class Squares(Stepping):
        def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
            difference = y - y_pred
            return ops.mean(difference * difference)

    x, y = (part.astype("float64") for part in run.rows())
    with run.scope():
        model = compiled(Squares())
    return outcome(model, model.fit(x, y, **FIT), predicted=model.predict(x, verbose=0))


@case()
def weights_clipped_after_the_update(run: Run) -> dict[str, Any]:
    class Clipped(Stepping):
        def after(self, values: list[Any]) -> list[Any]:
            return [ops.clip(value, -0.2, 0.2) for value in values]

    return stepped(run, Clipped)


@case()
def weights_projected_after_the_update(run: Run) -> dict[str, Any]:
    class Projected(Stepping):
        def after(self, values: list[Any]) -> list[Any]:
            return [value / (1e-3 + ops.sqrt(ops.sum(ops.square(value)))) for value in values]

    return stepped(run, Projected)


@case(backends=["tensorflow", "torch"])
def target_network_after_the_update(run: Run) -> dict[str, Any]:
    """A frozen copy follows the weights slowly."""

    class Follows(Stepping):
        def __init__(self) -> None:
            super().__init__()
            self.slow = self.add_weight(name="slow", shape=(1,), initializer="zeros", trainable=False)

        def after(self, values: list[Any]) -> None:
            self.slow.assign(0.9 * self.slow.value + 0.1 * values[-1])

    return stepped(run, Follows)


@case()
def gradients_clipped_by_hand(run: Run) -> dict[str, Any]:
    """Clipping is not linear: it must be done to the mean gradient."""

    class Clips(Stepping):
        def changed(self, gradients: list[Any]) -> list[Any]:
            return [ops.clip(gradient, -0.05, 0.05) for gradient in gradients]

    return stepped(run, Clips)


@case()
def loss_summed_by_hand(run: Run) -> dict[str, Any]:
    class Sums(Stepping):
        def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
            return ops.sum(ops.square(y - y_pred))

    return stepped(run, Sums, optimizer=keras.optimizers.SGD(0.005))


@case()
def loss_divided_by_a_fixed_batch(run: Run) -> dict[str, Any]:
    """The sum over rows by the number of rows that the author knows."""

    class Divides(Stepping):
        def loss_of(self, x: Any, y: Any, y_pred: Any) -> Any:
            return ops.sum(ops.square(y - y_pred)) / BATCH

    return stepped(run, Divides)


@case()
def loss_lambda_that_sums(run: Run) -> dict[str, Any]:
    loss = lambda y, y_pred: ops.sum(ops.square(y - y_pred))  # noqa: E731
    return outcome(*regress(run, loss=loss, optimizer=keras.optimizers.SGD(0.005)))


@case()
def loss_with_keras_own_sum(run: Run) -> dict[str, Any]:
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return outcome(*regress(run, loss=loss, optimizer=keras.optimizers.SGD(0.005)))


@case()
def loss_that_averages_with_weights(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with run.scope():
        model = compiled(dense(), loss=loss)
    return outcome(model, model.fit(x, y, sample_weight=np.linspace(0, 2, 37, dtype="f4"), **FIT))


@case()
def loss_of_one_number_with_weights(run: Run) -> dict[str, Any]:
    """Keras multiplies the number by the mean of the weights."""
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), loss=lambda y, y_pred: ops.mean(ops.square(y - y_pred)))
    return outcome(model, model.fit(x, y, sample_weight=np.linspace(0, 2, 37, dtype="f4"), **FIT))


@case()
def loss_of_rows(run: Run) -> dict[str, Any]:
    """A function that gives a number for each row, which Keras averages."""
    loss = lambda y, y_pred: ops.mean(ops.abs(y - y_pred) ** 1.5, axis=-1)  # noqa: E731
    return outcome(*regress(run, loss=loss))


@case()
def loss_of_the_whole_batch(run: Run) -> dict[str, Any]:
    """A loss that compares the rows of a batch with each other is no mean over rows."""
    loss = lambda y, y_pred: ops.mean(ops.square(y - ops.transpose(y_pred)))  # noqa: E731
    return outcome(*regress(run, loss=loss))


def overlap(run: Run, **options: Any) -> dict[str, Any]:
    x, y = run.rows()
    masks = ops.concatenate([y > 0, y <= 0], axis=1)
    with run.scope():
        model = compiled(dense(2, activation="softmax"), loss=keras.losses.Dice(**options))
    return outcome(model, model.fit(x, numbers(masks).astype("float32"), **FIT))


@case()
def loss_of_keras_over_the_whole_batch(run: Run) -> dict[str, Any]:
    """Dice's loss is that of all pixels of a batch, unless it is given axes."""
    return overlap(run)


@case()
def loss_of_keras_over_pixels_of_a_row(run: Run) -> dict[str, Any]:
    return overlap(run, axis=1)


@case()
def loss_of_a_class(run: Run) -> dict[str, Any]:
    class Huberish(keras.losses.Loss):
        def call(self, y: Any, y_pred: Any) -> Any:
            return ops.mean(ops.log(ops.cosh(y - y_pred)), axis=-1)

    return outcome(*regress(run, loss=Huberish(name="huberish"), metrics=["mae"]))


# Overridden methods


def base(run: Run) -> Any:
    """A functional model's class, inputs and outputs, for subclasses that override a method."""
    inputs = keras.Input((4,))
    return inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs))


def overridden(run: Run, kind: Any, **compile_options: Any) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(kind(*base(run)), **compile_options)
    history = model.fit(x, y, validation_data=(x[:21], y[:21]), **FIT)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return outcome(
        model, history, evaluated=evaluated, predicted=model.predict(x, batch_size=BATCH, verbose=0)
    )


@case()
def compute_loss_of_the_users_own(run: Run) -> dict[str, Any]:
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * ops.mean(ops.abs(y_pred))

    return overridden(run, Own, metrics=["mae"])


@case()
def compute_metrics_of_the_users_own(run: Run) -> dict[str, Any]:
    class Own(keras.Model):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "both": results["mae"] + results["mse"]}

    return overridden(run, Own, metrics=["mae", "mse"])


@case()
def metrics_of_the_models_own(run: Run) -> dict[str, Any]:
    """Metrics that compute_metrics updates and the property `metrics` lists."""

    class Own(keras.Model):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.size = keras.metrics.Mean(name="size")

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.size.update_state(ops.abs(y_pred))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    return overridden(run, Own, metrics=["mae"])


@case()
def train_step_around_keras(run: Run) -> dict[str, Any]:
    """Calls Keras' own step and adds to its logs."""

    class Own(keras.Model):
        def train_step(self, *arguments: Any) -> Any:
            result = super().train_step(*arguments)
            if keras.backend.backend() == "jax":
                logs, state = result
                return {**logs, "twice": 2 * logs["loss"]}, state
            return {**result, "twice": 2 * result["loss"]}

    return overridden(run, Own, metrics=["mae"])


@case()
def test_step_adds_logs(run: Run) -> dict[str, Any]:
    class Own(keras.Model):
        def test_step(self, *arguments: Any) -> Any:
            result = super().test_step(*arguments)
            if keras.backend.backend() == "jax":
                logs, state = result
                return {**logs, "twice": 2 * logs["loss"]}, state
            return {**result, "twice": 2 * result["loss"]}

    return overridden(run, Own, metrics=["mae"])


@case(backends=["tensorflow", "torch"])
def test_step_without_metrics(run: Run) -> dict[str, Any]:
    """A test_step that returns the loss of its batch."""

    class Own(keras.Model):
        def test_step(self, data: Any) -> Any:
            x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
            return {"loss": ops.mean(ops.square(y - self(x, training=False)))}

    return overridden(run, Own)


@case(backends=["tensorflow", "torch"])
def mean_by_hand_in_steps(run: Run) -> dict[str, Any]:
    """The way of Keras' guides: a Mean that takes the loss of each batch. It counts batches, not rows; with
    an uneven last batch it isn't the mean over rows, in plain Keras either."""

    class Own(keras.Model):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="mean")

        @property
        def metrics(self) -> Any:
            return [self.tracker]

        def test_step(self, data: Any) -> Any:
            x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
            self.tracker.update_state(ops.mean(ops.square(y - self(x, training=False))))
            return {"loss": self.tracker.result()}

    return overridden(run, Own)


@case(backends=["tensorflow", "torch"])
def mean_of_rows_by_hand_in_steps(run: Run) -> dict[str, Any]:
    class Own(keras.Model):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="mean")

        @property
        def metrics(self) -> Any:
            return [self.tracker]

        def test_step(self, data: Any) -> Any:
            x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
            self.tracker.update_state(ops.mean(ops.square(y - self(x, training=False)), axis=-1))
            return {"loss": self.tracker.result()}

    return overridden(run, Own)


@case()
def predict_step_of_the_users_own(run: Run) -> dict[str, Any]:
    class Own(keras.Model):
        def predict_step(self, *arguments: Any) -> Any:
            result = super().predict_step(*arguments)
            if keras.backend.backend() == "jax":
                outputs, state = result
                return {"raw": outputs, "sign": ops.sign(outputs)}, state
            return {"raw": result, "sign": ops.sign(result)}

    return overridden(run, Own)


@case()
def make_train_function_of_the_users_own(run: Run) -> dict[str, Any]:
    made: list[int] = []

    class Own(keras.Model):
        def make_train_function(self, force: bool = False) -> Any:
            made.append(1)
            result = super().make_train_function(force)
            return self.train_function or result

    result = overridden(run, Own)
    return {**result, "made": bool(made)}


@case()
def make_train_function_around_keras(run: Run) -> dict[str, Any]:
    """A train function that wraps Keras' own and is called once a step."""
    calls: list[int] = []

    class Own(keras.Model):
        def make_train_function(self, force: bool = False) -> Any:
            inner = super().make_train_function(force) or self.train_function

            def counted(*arguments: Any) -> Any:
                result = inner(*arguments)
                calls.append(1)
                return result

            if not getattr(inner, "counted", False):
                counted.counted = True  # type: ignore[attr-defined]
                self.train_function = counted
            return self.train_function

    return {**overridden(run, Own), "calls": len(calls)}


@case()
def fit_of_the_users_own(run: Run) -> dict[str, Any]:
    calls: list[str] = []

    class Own(keras.Model):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("fit")
            return super().fit(*args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("evaluate")
            return super().evaluate(*args, **kwargs)

        def predict(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("predict")
            return super().predict(*args, **kwargs)

    result = overridden(run, Own)
    return {**result, "calls": sorted(set(calls))}


@case()
def fit_of_the_users_own_with_other_arguments(run: Run) -> dict[str, Any]:
    x, y = run.rows()

    class Own(keras.Model):
        def fit(self, data: Any, rounds: int = 1) -> Any:
            return super().fit(*data, **{**FIT, "epochs": rounds})

    with run.scope():
        model = compiled(Own(*base(run)))
    return outcome(model, model.fit((x, y), rounds=3))


@case(backends=["tensorflow"])
def train_function_of_the_users_own(run: Run) -> dict[str, Any]:
    """The attribute `train_function`, set by hand, is what fit calls."""
    import tensorflow as tf

    x, y = run.rows(40)
    with run.scope():
        model = compiled(dense())
    seen: list[int] = []

    def by_hand(iterator: Any) -> Any:
        data = next(iterator)
        seen.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(data[1] - model(data[0], training=True)))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss}

    model.train_function = by_hand
    history = model.fit(x, y, **FIT)
    return outcome(model, history, seen=len(seen))
