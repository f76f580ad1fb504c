"""Cases of public reports: optimizers, and variables and flags that change between steps."""

from __future__ import annotations

from typing import Any

import keras
from keras_case_tools import (
    FIT,
    SEVERAL,
    Run,
    case,
    compiled,
    dense,
    outcome,
    regress,
    weights,
)
from keras_cases_models import stack
from keras_cases_training import with_optimizer

ops = keras.ops

# Optimizers


def decay() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01])


@case(strategies=SEVERAL)
def accumulation_with_a_schedule(run: Run) -> dict[str, Any]:
    """The schedule counts updates, not batches. The last gradients of an epoch wait for the next one."""
    return with_optimizer(run, keras.optimizers.SGD(decay(), gradient_accumulation_steps=2))


@case(strategies=SEVERAL)
def accumulation_with_averages(run: Run) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    )
    return with_optimizer(run, optimizer)


@case(strategies=SEVERAL)
def optimizers_over_whole_matrices(run: Run) -> dict[str, Any]:
    """Rules that look at the whole gradient of a matrix must see the mean gradient."""
    kinds = keras.optimizers
    found = {}
    for optimizer in (kinds.Adafactor(0.01), kinds.Muon(0.01), kinds.Lion(0.005), kinds.Nadam(0.01)):
        found[optimizer.name] = with_optimizer(run, optimizer)
    return found


@case(strategies=SEVERAL)
def state_of_the_optimizer_set_by_hand(run: Run) -> dict[str, Any]:
    """Moments are set to zero, and the count of updates, as a script does that resumes by itself."""
    x, y = run.rows()
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 12)
    model, first = regress(run, optimizer=keras.optimizers.SGD(schedule, momentum=0.9))
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(ops.zeros_like(variable))
    model.optimizer.iterations.assign(3)
    second = model.fit(x, y, **FIT)
    return outcome(model, second, first=first.history)


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the user's own."""

    def __init__(self, variable: Any = None) -> None:
        self.variable = variable

    def __call__(self, step: Any) -> Any:
        rate = 0.05 * ops.minimum(1.0, (ops.cast(step, "float32") + 1) / 6)
        return rate if self.variable is None else rate * ops.convert_to_tensor(self.variable)


@case(strategies=SEVERAL, backends=["tensorflow", "torch"])
def schedule_that_reads_a_variable(run: Run) -> dict[str, Any]:
    """A callback changes the number by which a schedule is multiplied."""
    factor = keras.Variable(1.0, trainable=False)

    class Halve(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            factor.assign(0.5**epoch)

    return with_optimizer(run, keras.optimizers.SGD(Warm(factor)), callbacks=[Halve()])


@case(strategies=SEVERAL)
def inner_rate_of_a_loss_scale_changed(run: Run) -> dict[str, Any]:
    class Change(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (epoch + 1)

    inner = keras.optimizers.SGD(0.5)
    return with_optimizer(
        run, keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), callbacks=[Change()]
    )


# Variables and flags


class Scaled(keras.layers.Layer):
    """Multiplies by a weight that no gradient moves, and which the script sets."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(name="factor", shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.factor


@case(strategies=SEVERAL)
def weight_set_between_steps(run: Run) -> dict[str, Any]:
    scale = Scaled()

    class Cool(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            scale.factor.assign(1.0 / (1 + batch))

    x, y = run.rows()
    with run.scope():
        model = compiled(stack((4,), keras.layers.Dense(3, "tanh"), scale, keras.layers.Dense(1)))
    history = model.fit(x, y, **FIT, callbacks=[Cool()], validation_data=(x, y))
    return outcome(model, history)


class Annealed(keras.Model):
    """A loss whose second part is weighed by a variable of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(3), keras.layers.Dense(1)
        self.beta = self.add_weight(name="beta", shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        self.add_loss(self.beta * ops.mean(ops.square(hidden)))
        return self.out(hidden)


@case(strategies=SEVERAL)
def loss_weighed_by_a_variable(run: Run) -> dict[str, Any]:
    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.beta.assign(0.5 * epoch)

    model, history = regress(run, {"epochs": 3, "callbacks": [Anneal()]}, make=Annealed)
    return outcome(model, history)


@case(strategies=SEVERAL, backends=["tensorflow", "torch"])
def loss_that_reads_a_variable_of_nobody(run: Run) -> dict[str, Any]:
    """The variable belongs to no layer. On JAX a compiled step keeps its first value."""
    beta = keras.Variable(0.0, trainable=False)

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            beta.assign(float(epoch))

    def loss(y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y - y_pred) + ops.convert_to_tensor(beta) * ops.abs(y_pred), axis=-1)

    model, history = regress(run, {"epochs": 3, "callbacks": [Anneal()]}, loss=loss)
    return outcome(model, history)


@case(strategies=SEVERAL, backends=["tensorflow", "torch"])
def frozen_between_fits_without_compiling(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense())
    first = model.fit(x, y, **FIT)
    model.layers[0].trainable = False
    second = model.fit(x, y, **FIT)
    return outcome(model, second, first=first.history)


@case(strategies=SEVERAL, backends=["tensorflow", "torch"])
def frozen_by_a_callback(run: Run) -> dict[str, Any]:
    """A flag that a callback sets in the middle of a fit does what it does in plain Keras."""

    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].trainable = epoch == 0

    model, history = regress(run, {"epochs": 3, "callbacks": [Freeze()]})
    return outcome(model, history)


@case(strategies=SEVERAL)
def averages_kept_by_a_callback(run: Run) -> dict[str, Any]:
    """A callback averages the weights itself, validates with the averages and puts the weights back."""

    class Averages(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.mean = self.model.get_weights()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pairs = zip(self.mean, self.model.get_weights(), strict=True)
            self.mean = [0.8 * mean + 0.2 * weight for mean, weight in pairs]

        def on_test_begin(self, logs: Any = None) -> None:
            self.kept = self.model.get_weights()
            self.model.set_weights(self.mean)

        def on_test_end(self, logs: Any = None) -> None:
            self.model.set_weights(self.kept)

    model, history = regress(
        run, {"epochs": 3, "validation_data": run.rows(20), "callbacks": [Averages()]}, metrics=["mae"]
    )
    return outcome(model, history)


@case(strategies=SEVERAL)
def weights_loaded_in_a_callback(run: Run) -> dict[str, Any]:
    """A callback goes back to the weights of the epoch before, from its own file."""
    path = run.folder / f"last-{run.index}.weights.h5"

    class GoBack(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                self.model.load_weights(path)
            else:
                self.model.save_weights(path)

    model, history = regress(
        run, {"epochs": 4, "callbacks": [GoBack()]}, optimizer=keras.optimizers.Adam(0.01)
    )
    return outcome(model, history)


@case(strategies=SEVERAL)
def layer_shared_by_two_models_in_turn(run: Run) -> dict[str, Any]:
    """Two models over one layer, each with an optimizer of its own: each sees what the other has changed."""
    x, y = run.rows()
    with run.scope():
        shared = keras.layers.Dense(3, "tanh")
        one = compiled(stack((4,), shared, keras.layers.Dense(1)))
        other = compiled(stack((4,), shared, keras.layers.Dense(1)), keras.optimizers.Adam(0.01))
    logs = []
    for _ in range(2):
        logs.append(one.fit(x, y, **FIT).history)
        logs.append(other.fit(x, -y, **FIT).history)
    return outcome(one, logs=logs, other=weights(other))
