"""Cases of public reports: custom loops, whose steps read what changes between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import keras
import numpy as np
from keras_case_tools import SEVERAL, Run, case, dense, numbers, weights
from keras_cases_models import stack
from keras_cases_streams import Sequence
from matrix_models import value_and_gradients

ops = keras.ops
SETTINGS: dict[str, Any] = {"beta": 0.0, "parts": {"beta": 0.0}, "list": [SimpleNamespace(beta=0.0)]}


class Looping:
    """A loop over the rows in batches: `step(x, y)` in each replica of the strategy, or as it is in plain
    Keras."""

    def __init__(
        self, run: Run, make: Callable[[], Any] = dense, optimizer: Any = None, count: int = 37
    ) -> None:
        self.strategy: Any = None
        self.batches = Sequence(run.rows(count))
        with run.scope():
            if run.strategy != "plain":
                import insitu

                self.strategy = insitu.get_strategy()
            self.model = make()
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer()
            self.optimizer.build(self.model.trainable_variables)
            self.seen = keras.metrics.Mean()

    def data(self) -> Any:
        if self.strategy is None:
            return [self.batches[index] for index in range(self.batches.num_batches)]
        return self.strategy.distribute_dataset(self.batches)

    def average(self, losses: Any) -> Any:
        return ops.mean(losses) if self.strategy is None else self.strategy.compute_average_loss(losses)

    def run(self, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.strategy is None:
            tensors = [ops.convert_to_tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
            return step(*tensors, **named)
        return self.strategy.run(step, args=arguments, kwargs=named)

    def sum(self, value: Any) -> float:
        if self.strategy is None:
            return float(numbers(value))
        return float(numbers(self.strategy.reduce("sum", value, axis=None)))

    def update(self, loss_of: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
        """One update by the mean of `loss_of(y, outputs)`, a number for each row."""
        forward = lambda: self.average(loss_of(y, self.model(x, training=True)))  # noqa: E731
        loss, gradients = value_and_gradients(forward, self.model)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def epochs(
        self, step: Any, before: Callable[[int], Any] = lambda epoch: None, count: int = 3
    ) -> dict[str, Any]:
        """`step` is called with each batch, `before` with the number of each epoch."""
        losses = []
        for epoch in range(count):
            before(epoch)
            losses.append([self.sum(self.run(step, x, y)) for x, y in self.data()])
        return {"losses": losses, "weights": weights(self.model)}


def squares(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p), axis=-1)


def penalized(y: Any, p: Any, beta: Any) -> Any:
    return squares(y, p) + beta * ops.mean(ops.abs(p), axis=-1)


@case(strategies=SEVERAL)
def loop_that_reads_a_dictionary_of_an_object(run: Run) -> dict[str, Any]:
    class Trainer(Looping):
        settings: ClassVar = {"beta": 0.0}

        def step(self, x: Any, y: Any) -> Any:
            return self.update(lambda y, p: penalized(y, p, self.settings["beta"]), x, y)

    loop = Trainer(run)
    return loop.epochs(loop.step, lambda epoch: loop.settings.update(beta=0.5 * epoch))


@case(strategies=SEVERAL)
def loop_whose_number_is_read_by_a_method(run: Run) -> dict[str, Any]:
    class Trainer(Looping):
        beta = 0.0

        def weigh(self, y: Any, p: Any) -> Any:
            return penalized(y, p, self.beta)

        def step(self, x: Any, y: Any) -> Any:
            return self.update(self.weigh, x, y)

    loop = Trainer(run)
    return loop.epochs(loop.step, lambda epoch: setattr(loop, "beta", 0.5 * epoch))


@case(strategies=SEVERAL)
def loop_whose_number_is_a_property(run: Run) -> dict[str, Any]:
    class Trainer(Looping):
        epoch = 0

        @property
        def beta(self) -> float:
            return 0.5 * self.epoch

        def step(self, x: Any, y: Any) -> Any:
            return self.update(lambda y, p: penalized(y, p, self.beta), x, y)

    loop = Trainer(run)
    return loop.epochs(loop.step, lambda epoch: setattr(loop, "epoch", epoch))


@case(strategies=SEVERAL)
def loop_with_an_array_that_is_changed_in_place(run: Run) -> dict[str, Any]:
    loop, beta = Looping(run), np.zeros(1, "float32")

    def step(x: Any, y: Any) -> Any:
        return loop.update(lambda y, p: penalized(y, p, beta), x, y)

    return loop.epochs(step, lambda epoch: beta.fill(0.5 * epoch))


@case(strategies=SEVERAL)
def loop_that_reads_settings_by_get(run: Run) -> dict[str, Any]:
    loop = Looping(run)

    def step(x: Any, y: Any) -> Any:
        return loop.update(lambda y, p: penalized(y, p, SETTINGS.get("beta", 0.0)), x, y)

    return loop.epochs(step, lambda epoch: SETTINGS.update(beta=0.5 * epoch))


@case(strategies=SEVERAL)
def loop_that_reads_an_object_in_a_list(run: Run) -> dict[str, Any]:
    loop = Looping(run)

    def step(x: Any, y: Any) -> Any:
        return loop.update(lambda y, p: penalized(y, p, SETTINGS["list"][0].beta), x, y)

    return loop.epochs(step, lambda epoch: setattr(SETTINGS["list"][0], "beta", 0.5 * epoch))


@case(strategies=SEVERAL)
def loop_of_a_partial_function(run: Run) -> dict[str, Any]:
    loop = Looping(run)

    def step(loop: Any, x: Any, y: Any) -> Any:
        return loop.update(lambda y, p: penalized(y, p, SETTINGS["beta"]), x, y)

    return loop.epochs(functools.partial(step, loop), lambda epoch: SETTINGS.update(beta=0.5 * epoch))


class Tempered(keras.layers.Layer):
    """A layer with a number of Python that the script changes."""

    heat = 1.0

    def call(self, x: Any) -> Any:
        return x * self.heat


@case(strategies=SEVERAL)
def loop_with_a_number_of_a_layer(run: Run) -> dict[str, Any]:
    layer = Tempered()
    loop = Looping(run, lambda: stack((4,), keras.layers.Dense(3, "tanh"), layer, keras.layers.Dense(1)))

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    return loop.epochs(step, lambda epoch: setattr(layer, "heat", 1.0 / (1 + epoch)))


@case(strategies=SEVERAL)
def loop_with_a_dropout_that_begins(run: Run) -> dict[str, Any]:
    """Dropout's rate is next to 0 in the first epoch, then nearly 1: the kernel has next to no gradient."""
    drop = keras.layers.Dropout(1e-6, seed=1)
    loop = Looping(run, lambda: stack((4,), drop, keras.layers.Dense(1)), lambda: keras.optimizers.SGD(0.1))

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    first = loop.epochs(step, count=1)
    drop.rate = 1 - 1e-6
    again = loop.epochs(step, count=1)
    kernels = [found["weights"]["0 kernel"] for found in (first, again)]
    return {"first": first, "kernel_stays": bool(np.abs(kernels[1] - kernels[0]).max() < 1e-6)}


class Focal(keras.losses.Loss):
    def __init__(self) -> None:
        super().__init__(reduction=None)
        self.power = 1.0

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(y - p) ** self.power, axis=-1)


@case(strategies=SEVERAL)
def loop_with_a_number_of_a_loss(run: Run) -> dict[str, Any]:
    loop, loss = Looping(run), Focal()

    def step(x: Any, y: Any) -> Any:
        return loop.update(loss, x, y)

    return loop.epochs(step, lambda epoch: setattr(loss, "power", 1.5 + 0.5 * epoch))


@case(strategies=SEVERAL)
def loop_with_another_function_in_an_attribute(run: Run) -> dict[str, Any]:
    loop = Looping(run)
    kinds = SimpleNamespace(loss=squares)

    def step(x: Any, y: Any) -> Any:
        return loop.update(kinds.loss, x, y)

    def absolute(y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(y - p), axis=-1)

    return loop.epochs(step, lambda epoch: setattr(kinds, "loss", absolute if epoch else squares))


@case(strategies=SEVERAL)
def loop_with_a_variable_that_is_set(run: Run) -> dict[str, Any]:
    with run.scope():
        beta = keras.Variable(0.0, trainable=False)
    loop = Looping(run)

    def step(x: Any, y: Any) -> Any:
        return loop.update(lambda y, p: penalized(y, p, ops.convert_to_tensor(beta)), x, y)

    return loop.epochs(step, lambda epoch: beta.assign(0.5 * epoch))


@case(strategies=SEVERAL)
def loop_that_changes_the_rate(run: Run) -> dict[str, Any]:
    loop = Looping(run)

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    def change(epoch: int) -> None:
        loop.optimizer.learning_rate = 0.1 / (1 + epoch)

    return {**loop.epochs(step, change), "steps": int(numbers(loop.optimizer.iterations))}


@case(strategies=SEVERAL)
def loop_with_momentum_that_is_set(run: Run) -> dict[str, Any]:
    """A number of the optimizer in Python."""
    loop = Looping(run)

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    def change(epoch: int) -> None:
        loop.optimizer.momentum = 0.9 - 0.4 * epoch

    return loop.epochs(step, change)


@case(strategies=SEVERAL)
def loop_with_weights_set_by_hand(run: Run) -> dict[str, Any]:
    """The average of the weights, taken on the host, replaces them at the end of each epoch."""
    loop = Looping(run)
    kept: list[Any] = []

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    def average(epoch: int) -> None:
        now = loop.model.get_weights()
        if kept:
            loop.model.set_weights([0.5 * (a + b) for a, b in zip(kept.pop(), now, strict=True)])
        kept.append(loop.model.get_weights())

    return loop.epochs(step, average)


@case(strategies=SEVERAL)
def loop_with_arguments_by_name(run: Run) -> dict[str, Any]:
    """Numbers, flags and nested structures as arguments."""
    loop = Looping(run)

    def step(x: Any, y: Any, *, options: Any, scale: float, absolute: bool) -> Any:
        def loss(y: Any, p: Any) -> Any:
            found = penalized(y, p, options["beta"][0]) * scale
            return found + ops.mean(ops.abs(y - p), axis=-1) if absolute else found

        return loop.update(loss, x, y)

    losses = []
    for epoch in range(3):
        for x, y in loop.data():
            named = {"options": {"beta": [0.1 * epoch]}, "scale": 1.0 / (epoch + 1), "absolute": epoch == 1}
            losses.append(loop.sum(loop.run(step, x, y, **named)))
    return {"losses": losses, "weights": weights(loop.model)}


@case(strategies=SEVERAL)
def loop_with_metrics_between_epochs(run: Run) -> dict[str, Any]:
    """A mean of rows, with an uneven last batch, read and reset at the end of each epoch; updated outside of
    steps, too."""
    loop, means = Looping(run), []

    def step(x: Any, y: Any) -> Any:
        loop.seen.update_state(squares(y, loop.model(x)))
        return loop.update(squares, x, y)

    def read(epoch: int) -> None:
        loop.seen.update_state(float(epoch))
        means.append(float(numbers(loop.seen.result())))
        loop.seen.reset_state()

    return {**loop.epochs(step, read), "means": means, "last": float(numbers(loop.seen.result()))}


@case(strategies=SEVERAL)
def loop_that_trains_and_tests_in_turn(run: Run) -> dict[str, Any]:
    """A test after each epoch by a step that returns rows."""
    loop, tested = Looping(run), []

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    def test(x: Any, y: Any) -> Any:
        return ops.sum(squares(y, loop.model(x, training=False)))

    def after(epoch: int) -> None:
        tested.append(sum(loop.sum(loop.run(test, x, y)) for x, y in loop.data()) / 37)

    return {**loop.epochs(step, after), "tested": tested}


@case(strategies=SEVERAL)
def loop_over_a_part_of_the_weights(run: Run) -> dict[str, Any]:
    """Two optimizers for two parts, the second one at every second epoch."""
    loop = Looping(run)
    with run.scope():
        second = keras.optimizers.Adam(0.01)
        second.build(loop.model.layers[-1].trainable_variables)

    def step(x: Any, y: Any, both: bool = False) -> Any:
        forward = lambda: loop.average(squares(y, loop.model(x, training=True)))  # noqa: E731
        loss, gradients = value_and_gradients(forward, loop.model)
        if both:
            second.apply(gradients[2:], loop.model.layers[-1].trainable_variables)
        loop.optimizer.apply(gradients, loop.model.trainable_variables) if not both else None
        return loss

    losses = []
    for epoch in range(4):
        losses.append([loop.sum(loop.run(step, x, y, both=bool(epoch % 2))) for x, y in loop.data()])
    return {"losses": losses, "weights": weights(loop.model)}


@case(strategies=SEVERAL)
def loop_with_gradients_clipped_together(run: Run) -> dict[str, Any]:
    """Clipping by the optimizer is of the sum over replicas."""
    loop = Looping(run, optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05))

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    return loop.epochs(step)


@case(strategies=SEVERAL)
def loop_with_state_that_averages(run: Run) -> dict[str, Any]:
    """A weight that the forward pass moves by the mean of its rows, in batches of even parts."""

    class Mean(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(name="mean", shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            centered = x - self.mean
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            return centered

    loop = Looping(run, lambda: stack((4,), Mean(), keras.layers.Dense(1)), count=40)

    def step(x: Any, y: Any) -> Any:
        return loop.update(squares, x, y)

    return loop.epochs(step)
