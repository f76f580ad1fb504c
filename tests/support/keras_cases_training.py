"""Cases: optimizers, precision, what is trained, saving and copies."""

from __future__ import annotations

from typing import Any

import keras
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
    weights,
)
from keras_cases_models import stack, trained

# Optimizers


def with_optimizer(run: Run, optimizer: Any, **fit: Any) -> dict[str, Any]:
    model, history = regress(run, {"epochs": 3, **fit}, optimizer=optimizer)
    moved = model.optimizer.variables
    state = {f"{i} {v.path.rsplit('/', 1)[-1]}": numbers(v) for i, v in enumerate(moved)}
    return outcome(model, history, optimizer=state)


@case()
def adam(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.Adam(0.01, amsgrad=True))


@case()
def adamw_with_excluded_weights(run: Run) -> dict[str, Any]:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return with_optimizer(run, optimizer)


@case()
def rmsprop_centered(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True))


@case()
def lamb(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.Lamb(0.01))


@case()
def clip_by_norm(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.SGD(0.1, clipnorm=0.3))


@case()
def clip_by_value(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.SGD(0.1, clipvalue=0.05))


@case()
def clip_by_global_norm(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.SGD(0.1, global_clipnorm=0.3))


@case()
def averaged_weights(run: Run) -> dict[str, Any]:
    return with_optimizer(
        run, keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=4)
    )


@case()
def averaged_weights_at_the_end(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7))


@case()
def gradient_accumulation(run: Run) -> dict[str, Any]:
    return with_optimizer(run, keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3))


@case()
def loss_scale(run: Run) -> dict[str, Any]:
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    return with_optimizer(
        run, keras.optimizers.LossScaleOptimizer(inner, initial_scale=16.0, dynamic_growth_steps=4)
    )


@case()
def optimizer_by_its_own_class(run: Run) -> dict[str, Any]:
    class Signs(keras.optimizers.Optimizer):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            step = keras.ops.cast(learning_rate, variable.dtype) * keras.ops.sign(gradient)
            self.assign_sub(variable, step)

    return with_optimizer(run, Signs(0.01))


@case()
def constraints_on_weights(run: Run) -> dict[str, Any]:
    make = lambda: dense(kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg")  # noqa: E731
    return trained(run, make, *run.rows())


def half(run: Run, policy: str, optimizer: Any = None) -> dict[str, Any]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        x, y = run.rows()
        with run.scope():
            hidden = keras.layers.Dense(5, "tanh")
            model = compiled(stack((4,), hidden, keras.layers.Dense(1, dtype="float32")), optimizer)
        history = model.fit(x, y, **FIT)
        result = outcome(model, history, optimizer=type(model.optimizer).__name__)
    finally:
        keras.config.set_dtype_policy(before)
    # Sums of halves differ by rounding with each order of adding.
    result["half"] = {name: result.pop(name) for name in ("weights", "history")}
    return result


@case()
def mixed_float16(run: Run) -> dict[str, Any]:
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    return half(run, "mixed_float16", keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10))


@case()
def mixed_float16_at_a_scale_that_overflows(run: Run) -> dict[str, Any]:
    """Keras leaves steps out whose gradients overflow, and halves the scale. Replicas leave out the same,
    though each divides by its own, fewer rows."""
    result = half(run, "mixed_float16")
    course = result["half"]["history"]["loss"]
    return {**result, "learns": course[-1] < course[0]}


@case()
def mixed_bfloat16(run: Run) -> dict[str, Any]:
    return half(run, "mixed_bfloat16")


@case()
def float64_policy(run: Run) -> dict[str, Any]:
    x, y = (part.astype("float64") for part in run.rows())
    return trained(run, lambda: stack((4,), keras.layers.Dense(1, dtype="float64")), x, y)


@case()
def jit_compile(run: Run) -> dict[str, Any]:
    if run.backend == "torch":  # compiled by a C++ compiler that need not be there
        return {}
    return trained(run, dense, *run.rows(), jit_compile=True, metrics=["mae"])


@case()
def run_eagerly(run: Run) -> dict[str, Any]:
    return trained(run, dense, *run.rows(), run_eagerly=True, metrics=["mae"])


@case()
def run_eagerly_sees_values(run: Run) -> dict[str, Any]:
    """An eager step may look at its values."""
    seen: list[int] = []

    class Looks(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x: Any, training: bool = False) -> Any:
            if training and float(keras.ops.convert_to_numpy(x).sum()) < 1e9:
                seen.append(1)
            return self.out(x)

    if run.backend == "jax":  # gradients are traced there in any case
        return {}
    result = trained(run, Looks, *run.rows(), run_eagerly=True)
    return {**result, "looked": bool(seen)}


# What is trained


def backbone(train: bool) -> Any:
    model = dense(2)
    model.trainable = train
    return model


@case()
def frozen_layers(run: Run) -> dict[str, Any]:
    return trained(run, lambda: stack((4,), backbone(False), keras.layers.Dense(1)), *run.rows())


def unfrozen(run: Run, inside: bool, **changes: Any) -> dict[str, Any]:
    """Trains with a frozen part, then thaws it and compiles again."""
    x, y = run.rows()
    with run.scope():
        part = backbone(False)
        model = compiled(stack((4,), part, keras.layers.Dense(1)), metrics=["mae"])
    first = model.fit(x, y, **FIT)
    part.trainable = True
    changes = {"optimizer": keras.optimizers.SGD(0.01), **changes}
    if inside:
        with run.scope():
            compiled(model, **changes)
    else:
        compiled(model, **changes)
    second = model.fit(x, y, validation_data=(x, y), **FIT)
    evaluated = model.evaluate(x, y, verbose=0, return_dict=True)
    return outcome(
        model, second, first=first.history, evaluated=evaluated, predicted=model.predict(x, verbose=0)
    )


@case()
def compiled_again_in_scope(run: Run) -> dict[str, Any]:
    return unfrozen(run, True)


@case()
def compiled_again_outside_of_the_scope(run: Run) -> dict[str, Any]:
    return unfrozen(run, False)


@case()
def compiled_again_with_another_loss(run: Run) -> dict[str, Any]:
    return unfrozen(run, False, loss="mae", metrics=["mse"])


@case()
def compiled_again_before_any_fit(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense())
    compiled(model, keras.optimizers.Adam(0.01), "mae", metrics=["mse"])
    return outcome(model, model.fit(x, y, **FIT))


@case()
def thawed_without_compiling(run: Run) -> dict[str, Any]:
    """Keras continues with what was compiled."""
    x, y = run.rows()
    with run.scope():
        model = compiled(dense())
    first = model.fit(x, y, **FIT)
    model.optimizer.learning_rate = 0.01
    return outcome(model, model.fit(x, y, **FIT), first=first.history)


@case()
def nothing_to_train(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        model = compiled(dense(), metrics=["mae"])
        model.trainable = False
        compiled(model, metrics=["mae"])
    history = model.fit(x, y, **FIT)
    return {
        "history": history.history,
        "weights": weights(model),
        "evaluated": model.evaluate(x, y, verbose=0),
    }


@case()
def no_weights_at_all(run: Run) -> dict[str, Any]:
    x, _ = run.rows()
    with run.scope():
        model = compiled(stack((4,), keras.layers.Rescaling(2.0)), metrics=["mae"])
    evaluated = model.evaluate(x, x, batch_size=BATCH, verbose=0)
    history = model.fit(x, x, **FIT)
    return {"evaluated": evaluated, "history": history.history, "predicted": model.predict(x, verbose=0)}


# Saving, copies


@case()
def set_weights_between_fits(run: Run) -> dict[str, Any]:
    model, first = regress(run)
    model.set_weights([0.5 * value for value in model.get_weights()])
    second = model.fit(*run.rows(), **FIT)
    return outcome(model, second, first=first.history)


@case()
def fit_after_load(run: Run) -> dict[str, Any]:
    """A saved model continues with the optimizer's state."""
    x, y = run.rows()
    model, first = regress(run, optimizer=keras.optimizers.Adam(0.01), metrics=["mae"])
    path = run.folder / f"model-{run.index}.keras"
    model.save(path)
    with run.scope():
        loaded = keras.models.load_model(path)
    evaluated = loaded.evaluate(x, y, verbose=0)
    second = loaded.fit(x, y, **FIT)
    return outcome(loaded, second, first=first.history, evaluated=evaluated)


@case()
def load_weights_between_fits(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    path = run.folder / f"model-{run.index}.weights.h5"
    model, first = regress(run, optimizer=keras.optimizers.Adam(0.01))
    model.save_weights(path)
    model.fit(x, y, **FIT)
    model.load_weights(path)
    second = model.fit(x, y, **FIT)
    return outcome(model, second, first=first.history)


@case()
def clone_of_a_trained_model(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    model, first = regress(run)
    with run.scope():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        compiled(clone, keras.optimizers.Adam(0.01))
    second = clone.fit(x, y, **FIT)
    return outcome(clone, second, first=first.history, kept=weights(model))


@case()
def two_models_in_turn(run: Run) -> dict[str, Any]:
    x, y = run.rows()
    with run.scope():
        one, other = compiled(dense()), compiled(dense(), keras.optimizers.Adam(0.01))
    logs = []
    for _ in range(2):
        logs.append(one.fit(x, y, **FIT).history)
        logs.append(other.fit(x, one.predict(x, verbose=0), **FIT).history)
    return outcome(one, logs=logs, other=weights(other))


@case()
def weights_of_part_of_a_model(run: Run) -> dict[str, Any]:
    """A model over some layers of a trained one shares their weights."""
    x, _ = run.rows()
    model, history = regress(run)
    part = keras.Model(model.inputs, model.layers[0].output)
    return outcome(model, history, features=part.predict(x, verbose=0))
