"""What is made in a strategy's scope: the optimizers whose gradients are summed over replicas, and the
weights that replicas must have alike."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common.variables import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from insitu.errors import TrainingError

_MADE_IN = "_insitu_made_in"
_numbers = itertools.count()


class Scope:
    """Notes, without keeping it alive, what is made while it is open."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._optimizers: list[weakref.ref[Any]] = []
        self._variables: list[weakref.ref[Any]] = []
        self._layers: list[weakref.ref[Any]] = []

    @property
    def optimizers(self) -> list[Any]:
        return _alive(self._optimizers)

    @property
    def layers(self) -> list[Any]:
        return _alive(self._layers)

    def check_made_here(self, variables: Iterable[Any]) -> None:
        """Raises TrainingError where one was made in the scope of another strategy, which has placed it."""
        for variable in variables:
            maker = getattr(variable, _MADE_IN, None)
            if maker is not None and maker != self._number:
                raise TrainingError(
                    "A model is made, compiled and trained in the scope of one strategy. Received: the "
                    f"variable {variable.path!r}, made in another strategy's scope. Make the model anew in "
                    "this one's, and give it the weights of the other by set_weights()."
                )

    def _note(self, variable: Any) -> None:
        self._variables.append(weakref.ref(variable))
        object.__setattr__(variable, _MADE_IN, self._number)

    def weights(self) -> list[Any]:
        """The trainable variables, in the order in which they were made."""
        return [v for v in _alive(self._variables) if v.trainable]

    @contextlib.contextmanager
    def opened(self, on_compile: Callable[[Any], None], before_fit: Callable[[Any], None]) -> Iterator[None]:
        """While open, notes are taken, `on_compile` is called with each model that was compiled, and
        `before_fit` with each that Keras' own `fit` is about to train."""
        with (
            _before(keras.Model, "fit", before_fit),
            _after(Trainer, "compile", on_compile),
            _after(BaseOptimizer, "__init__", lambda made: self._optimizers.append(weakref.ref(made))),
            _after(keras.layers.Layer, "__init__", lambda made: self._layers.append(weakref.ref(made))),
            _after(Variable, "__init__", self._note),
        ):
            yield


def _alive(references: list[weakref.ref[Any]]) -> list[Any]:
    references[:] = [reference for reference in references if reference() is not None]
    # Once each: an initializer may be passed twice, by a class and by its base.
    return list({id(made): made for made in (reference() for reference in references)}.values())


@contextlib.contextmanager
def _before(owner: type, name: str, told: Callable[[Any], None]) -> Iterator[None]:
    """While open, `told` is called with the object that a method of `owner` is called on."""
    where = next(base for base in owner.__mro__ if name in vars(base))
    original = getattr(where, name)

    @functools.wraps(original)
    def method(called: Any, *args: Any, **kwargs: Any) -> Any:
        told(called)
        return original(called, *args, **kwargs)

    setattr(where, name, method)
    try:
        yield
    finally:
        setattr(where, name, original)


@contextlib.contextmanager
def _after(owner: type, name: str, told: Callable[[Any], None]) -> Iterator[None]:
    """While open, `told` is called with the object that a method of `owner` has returned from."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        told(made)

    # Keras reads from it what a layer is made of, not looking behind wrappers everywhere.
    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
