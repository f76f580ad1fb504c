"""Report if a row that a batch looks up several times trains otherwise than in plain Keras on TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras

from insitu.base.context import context
from insitu.train.replica.update_count import inner_optimizer

_CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")
_named: list[str] = []
"""Layers that this process has already named."""


def tell_repeated_rows(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Name, in the chief and once, the layers whose gradients an optimizer gets added up by rows.

    TensorFlow's gradient of an Embedding has an entry for each time that a batch looks a row up. Most
    optimizers of Keras square or clip each entry by itself there; SGD without clipping adds them up.
    """
    pairs = zip(gradients, variables, strict=False)
    layers = [_name_layer(variable) for gradient, variable in pairs if hasattr(gradient, "dense_shape")]
    if not layers or _named or _is_linear(inner_optimizer(optimizer)) or not context().is_chief:
        return
    _named.extend(layers)
    kind = type(inner_optimizer(optimizer)).__name__
    sys.stderr.write(
        f"[insitu] {', '.join(dict.fromkeys(layers))}: {kind} gets the sum of the gradients of a row that a "
        "batch looks up several times, as on JAX and PyTorch. Plain Keras on TensorFlow gives it each by "
        "itself, so losses differ. Compare with plain Keras on another backend, or tune the learning rate "
        "again\n"
    )


def _is_linear(optimizer: Any) -> bool:
    """Return True if an update by several gradients is that by their sum."""
    return type(optimizer) is keras.optimizers.SGD and not any(getattr(optimizer, n) for n in _CLIPS)


def _name_layer(variable: Any) -> str:
    path: str = variable.path
    return path.split("/")[-2] if "/" in path else path
