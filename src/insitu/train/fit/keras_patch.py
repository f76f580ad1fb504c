"""Replaces methods of a compiled Keras model, so that its calls and its steps go to a trainer.

`fit`, `evaluate` and `predict` keep their signatures. In the middle of the first two Keras' own loop runs,
which asks the model for a train function and a test function: those are replaced too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from insitu.train.replica import Logs, wrap_train_function

TRAINER_ATTRIBUTE = "_insitu_trainer"
"""The attribute of a model that holds its trainer."""


class ModelTrainer(Protocol):
    """Takes a model's calls, with their arguments by name, and its steps."""

    def fit(self, arguments: dict[str, Any]) -> Any:
        """Do what `model.fit` does."""

    def evaluate(self, arguments: dict[str, Any]) -> Any:
        """Do what `model.evaluate` does."""

    def predict(self, arguments: dict[str, Any]) -> Any:
        """Do what `model.predict` does."""

    def train_on(self, source: Iterable[Any]) -> Logs:
        """Do up to `steps_per_execution` training steps."""

    def test_on(self, source: Iterable[Any]) -> Logs:
        """Do up to `steps_per_execution` test steps."""


@dataclass(frozen=True, slots=True)
class KerasMethods:
    """Keras' own methods of a model, bound to it."""

    #: `model.fit`.
    fit: Callable[..., Any]
    #: `model.evaluate`.
    evaluate: Callable[..., Any]
    #: `model.predict`.
    predict: Callable[..., Any]


def patch_model(model: Any, trainer: ModelTrainer) -> KerasMethods:
    """Replace the methods of `model`. Returns those that were replaced."""
    # From the class: the model may be compiled for the second time.
    keras_methods = KerasMethods(
        *(getattr(type(model), name).__get__(model) for name in ("fit", "evaluate", "predict"))
    )
    model.fit = _by_name(keras_methods.fit, trainer.fit)
    model.evaluate = _by_name(keras_methods.evaluate, trainer.evaluate)
    model.predict = _by_name(keras_methods.predict, trainer.predict)
    model.make_train_function = _maker(model, "train_function", trainer.train_on)
    model.make_test_function = _maker(model, "test_function", trainer.test_on)
    # Around Keras' tracking: the trainer is no part of the model's state.
    object.__setattr__(model, TRAINER_ATTRIBUTE, trainer)
    return keras_methods


def _by_name(original: Callable[..., Any], call: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return a method with the signature of `original` that gives `call` its arguments by name."""
    signature = inspect.signature(original)

    def method(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return call(dict(bound.arguments))

    method.__name__, method.__doc__ = original.__name__, original.__doc__
    return method


def _maker(model: Any, attribute: str, run: Callable[[Iterable[Any]], Logs]) -> Callable[..., Any]:
    """Return what Keras calls to have `model.train_function` or `model.test_function` made."""
    function = wrap_train_function(model, run)

    def make(force: bool = False) -> Callable[..., Any]:
        setattr(model, attribute, function)
        return function

    return make


def merge_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name with those of **kwargs beside the others."""
    named = {name: value for name, value in arguments.items() if name != "kwargs"}
    return {**named, **arguments.get("kwargs", {})}
