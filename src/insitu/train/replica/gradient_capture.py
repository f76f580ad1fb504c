"""Capture the gradients of a `train_step` before they reach the optimizer.

Any `train_step`, Keras' own or a user's, ends in `optimizer.apply`. While the step is traced, that call is
recorded instead of done. What comes before it (forward pass, loss, backward pass) and after it (metrics)
stays as written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from insitu.errors import TrainingError


class CapturedGradients:
    """The arguments of `optimizer.apply`: `gradients[i]` belongs to `variables[i]`, None where the loss
    doesn't depend on it."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.variables: list[Any] = []
        self.calls = 0


@contextlib.contextmanager
def capture_gradients(optimizer: Any) -> Iterator[CapturedGradients]:
    """While open, `optimizer.apply`, and JAX' `stateless_apply`, record their arguments and change
    nothing."""
    captured = CapturedGradients()

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        captured.calls += 1
        captured.gradients = list(grads)
        captured.variables = list(
            optimizer._trainable_variables if trainable_variables is None else trainable_variables
        )

    def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        apply(grads)
        return trainable_variables, optimizer_variables

    # Around Keras' attribute tracking: this is no part of the optimizer's state.
    object.__setattr__(optimizer, "apply", apply)
    object.__setattr__(optimizer, "stateless_apply", stateless_apply)
    try:
        yield captured
    finally:
        object.__delattr__(optimizer, "apply")
        object.__delattr__(optimizer, "stateless_apply")
    has_nothing_to_train = not getattr(optimizer, "_trainable_variables", True)
    if captured.calls != 1 and not (has_nothing_to_train and not captured.calls):
        raise TrainingError(
            "A train_step must call its optimizer's apply() or apply_gradients() exactly once, so that the "
            f"gradient can be combined over shards. Received: {captured.calls} calls."
        )
