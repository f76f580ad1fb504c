"""Decides which calls of a model need insitu, and which Keras does by itself."""

from __future__ import annotations

from typing import Any

import keras

from insitu.grid import Dataset
from insitu.train.fit.callbacks import flatten_callbacks


def needs_insitu(arguments: dict[str, Any]) -> bool:
    """Return whether a call with these arguments, by name, has rows to account for or a training to take
    up."""
    validation = arguments.get("validation_data")
    data = (arguments.get("x"), *(validation if isinstance(validation, tuple) else (validation,)))
    callbacks = flatten_callbacks(arguments.get("callbacks"))
    return any(isinstance(part, Dataset) for part in data) or any(
        getattr(callback, "restores_training", False) for callback in callbacks
    )


def check_delegated() -> None:
    """Raise TrainingError where Keras would do a call in another way than the strategy says."""
    if keras.backend.backend() == "jax":
        from insitu.train.replica.jax import refuse_distribution

        refuse_distribution()
