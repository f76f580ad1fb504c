"""Find the count of a model's updates: its optimizer, and its name in a saved state."""

from __future__ import annotations

from typing import Any

import keras

from insitu.train.replica.state import to_numpy

_LOSS_SCALE_VARIABLES = 4
"""Those of its own that a built LossScaleOptimizer has: iteration, learning rate, step counter, scale."""


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that makes the updates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def read_call_count(optimizer: Any) -> int:
    """Return how many gradients an optimizer has been given, one for each step."""
    return int(to_numpy(inner_optimizer(optimizer)._iterations))


def read_update_count(optimizer: Any) -> int:
    """Return how many updates an optimizer has made: fewer than steps if it accumulates gradients.

    This is Keras' `iterations`, which is a variable or, with accumulation, a value of the backend.
    """
    return read_call_count(optimizer) // count_calls_of_update(optimizer)


def count_calls_of_update(optimizer: Any) -> int:
    """Return how many gradients make an update."""
    return getattr(inner_optimizer(optimizer), "gradient_accumulation_steps", None) or 1


def name_update_count(optimizer: Any) -> str:
    """Return the name of the count of gradients in a saved state: that of an optimizer's first variable. A
    LossScaleOptimizer has its own variables, and a count that stays 0, before those of the inner one."""
    index = 0 if inner_optimizer(optimizer) is optimizer else _LOSS_SCALE_VARIABLES
    return f"optimizer/{index}"
