"""Decides which calls of a model need insitu, and which Keras does by itself."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
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


def warn_of_own_fit(model: Any) -> None:
    """Warn where a model has a `fit` of the user's own that seems to train without Keras' `fit` and without a
    custom loop: several replicas would train apart."""
    fit = getattr(type(model), "fit", None)
    if fit is None or fit is keras.Model.fit or not isinstance(fit, types.FunctionType):
        return
    if not {"fit", "run"}.intersection(_names_in(fit.__code__)):
        warnings.warn(
            "With several replicas a model trains together with the others in Keras' fit, or in a custom "
            f"loop. Received: {type(model).__name__}.fit, which seems to call neither super().fit nor "
            "strategy.run: each process would train a model of its own. Override train_step, or give the "
            "step to strategy.run.",
            stacklevel=2,
        )


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals that a function uses, with those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
