"""Capture the gradients of a `train_step` before they reach the optimizer.

Any `train_step`, Keras' own or a user's, ends in `optimizer.apply`. While the step is traced, that call is
recorded instead of done. The code before it (forward pass, loss, backward pass) and after it (metrics) stays
as written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from insitu.train.replica.repeated_rows import tell_repeated_rows
from insitu.train.replica.updated_weights import UpdatedValue, find_learning_rate, make_error

_OPTIMIZERS = (BaseOptimizer, LossScaleOptimizer)
"""The classes whose methods all optimizers come to in the end."""
_UPDATES = ("apply", "stateless_apply")


class CapturedGradients:
    """The arguments of `optimizer.apply`: `gradients[i]` belongs to `variables[i]`, None if the loss
    doesn't depend on it."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.variables: list[Any] = []
        self.calls = 0
        self.scaled = False
        """True once the step has scaled its loss."""
        self.updated: list[Any] = []
        """The values that JAX' `stateless_apply` gave the step in place of the updated variables."""

    def sort_for(self, variables: Sequence[Any]) -> list[Any]:
        """Return the gradient for each of `variables`, None if there is none."""
        by_variable = {id(v): g for v, g in zip(self.variables, self.gradients, strict=True)}
        return [by_variable.get(id(variable)) for variable in variables]

    def is_applied(self) -> bool:
        """Return True once the step has called `apply`."""
        return self.calls > 0


@contextlib.contextmanager
def capture_gradients(
    optimizer: Any,
    on_apply: Callable[[], None] | None = None,
    *,
    trains: bool = True,
    loss_exponent: int = 0,
) -> Iterator[CapturedGradients]:
    """While open, `optimizer.apply`, and JAX' `stateless_apply`, record their arguments and change
    nothing. They call `on_apply`. A step must call one of them once, or may call none unless it `trains`
    anything. If the optimizer scales losses, they are scaled by 2**-loss_exponent too, and the recorded
    gradients are scaled back: those in between are of float16 and overflow."""
    captured = CapturedGradients()
    scale_loss: Any = getattr(optimizer, "scale_loss", None)

    def scale_down(loss: Any) -> Any:
        captured.scaled = True
        return keras.ops.multiply(scale_loss(loss), 2.0**-loss_exponent)

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        captured.calls += 1
        captured.gradients = [_scale_up(g, loss_exponent) if captured.scaled else g for g in grads]
        captured.variables = list(
            optimizer._trainable_variables if trainable_variables is None else trainable_variables
        )
        if isinstance(optimizer, _OPTIMIZERS):
            tell_repeated_rows(optimizer, captured.gradients, captured.variables)
        if on_apply is not None:
            on_apply()

    def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        apply(grads)
        names = [variable.path for variable in captured.variables]
        captured.updated = [UpdatedValue(name) for name in names[: len(trainable_variables)]]
        moved = [
            value if variable is find_learning_rate(optimizer) else UpdatedValue(variable.path)
            for variable, value in zip(optimizer.variables, optimizer_variables, strict=True)
        ]
        return list(captured.updated), moved

    # Around Keras' attribute tracking: this is no part of the optimizer's state.
    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "stateless_apply", stateless_apply)
    if loss_exponent and _scales_losses(optimizer):
        object.__setattr__(optimizer, "scale_loss", scale_down)
    try:
        with _refuse_other_optimizers():
            yield captured
    finally:
        object.__delattr__(optimizer, "apply")
        object.__delattr__(optimizer, "stateless_apply")
        vars(optimizer).pop("scale_loss", None)
    if captured.calls != 1 and (trains or captured.calls):
        raise make_error(
            "A train_step must call its optimizer's apply() or apply_gradients() exactly once, so that the "
            f"gradient can be combined over shards. Received: {captured.calls} calls."
        )


def _scales_losses(optimizer: Any) -> bool:
    return isinstance(optimizer, LossScaleOptimizer) or bool(getattr(optimizer, "loss_scale_factor", None))


def _scale_up(gradient: Any, exponent: int) -> Any:
    if gradient is None:
        return None
    if hasattr(gradient, "dense_shape"):  # TensorFlow's gradient of a few rows
        values = _scale_up(gradient.values, exponent)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    gradient = keras.ops.convert_to_tensor(gradient)
    if keras.backend.standardize_dtype(gradient.dtype) == "float16":
        gradient = keras.ops.cast(gradient, "float32")
    return keras.ops.multiply(gradient, 2.0**exponent)


@contextlib.contextmanager
def _refuse_other_optimizers() -> Iterator[None]:
    """While open, any optimizer whose update isn't recorded raises TrainingError."""
    originals = [(kind, name, kind.__dict__.get(name)) for kind in _OPTIMIZERS for name in _UPDATES]
    for kind, name, _ in originals:
        setattr(kind, name, _refuse)
    try:
        yield
    finally:
        for kind, name, original in originals:
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)


def _refuse(optimizer: Any, *arguments: Any, **options: Any) -> None:
    del arguments, options
    raise make_error(
        "Gradients are combined over shards only for the optimizer given to compile(). Received: a "
        f"train_step that applies another one, {optimizer.name!r}. Train with several optimizers in a custom "
        "loop (strategy.run)."
    )
