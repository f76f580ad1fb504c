"""Track what is created in a strategy's scope: the optimizers whose gradients are summed over replicas, and
the weights that must be equal on all replicas."""

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

from insitu.base.errors import TrainingError
from insitu.train.custom_loop.replica_check import hash_values

_MADE_IN = "_insitu_made_in"
_FIRST_VALUE = "_insitu_first_value"
_numbers = itertools.count()


class CreationTracker:
    """Records what is created while it is open, by weak references."""

    def __init__(self) -> None:
        #: The number of the strategy among those of this process.
        self.number = next(_numbers)
        #: Whether to remember the first values of variables that are made from now on.
        self.keeps_first_values = False
        self._optimizers: list[weakref.ref[Any]] = []
        self._variables: list[weakref.ref[Any]] = []
        self._made_trainable: list[weakref.ref[Any]] = []
        self._layers: list[weakref.ref[Any]] = []

    @property
    def optimizers(self) -> list[Any]:
        return _alive(self._optimizers)

    @property
    def layers(self) -> list[Any]:
        return _alive(self._layers)

    def check_created_here(self, variables: Iterable[Any]) -> None:
        """Raise TrainingError if one was created in the scope of another strategy, which has placed it."""
        for variable in variables:
            maker = getattr(variable, _MADE_IN, None)
            if maker is not None and maker != self.number:
                raise TrainingError(
                    "A model is made, compiled and trained in the scope of one strategy. Received: the "
                    f"variable {variable.path!r}, made in another strategy's scope. Make a new model in "
                    "this one's, and give it the weights of the other by set_weights()."
                )

    def _note(self, variable: Any) -> None:
        self._variables.append(weakref.ref(variable))
        if variable.trainable:
            self._made_trainable.append(weakref.ref(variable))
        object.__setattr__(variable, _MADE_IN, self.number)
        if self.keeps_first_values and variable._value is not None:
            object.__setattr__(variable, _FIRST_VALUE, hash_values([variable]))

    def are_weights_as_made(self) -> bool:
        """Return whether each weight still has its first value, as far as these were kept."""
        weights = self.weights()
        return bool(weights) and all(getattr(v, _FIRST_VALUE, None) == hash_values([v]) for v in weights)

    def weights(self) -> list[Any]:
        """Return the trainable variables, in the order of their creation."""
        return [v for v in _alive(self._variables) if v.trainable]

    def find_frozen(self) -> tuple[int, ...]:
        """Return the ids of the layers, and of the variables that were made trainable, that are frozen now. A
        compiled step updates what was trainable when it was traced."""
        layers = (id(layer) for layer in self.layers if not layer._trainable)
        return (*layers, *(id(v) for v in _alive(self._made_trainable) if not v.trainable))

    def summed(self) -> list[Any]:
        """Return the variables that are summed over replicas, such as those of metrics, in the order of their
        creation."""
        return [v for v in _alive(self._variables) if getattr(v, "aggregation", None) == "sum"]

    @contextlib.contextmanager
    def track(
        self,
        on_compile: Callable[[Any], None],
        before_fit: Callable[[Any], None],
        on_layer: Callable[[Any], None] = lambda layer: None,
    ) -> Iterator[None]:
        """While open, record what is created. `on_compile` is called with each model that was compiled,
        `before_fit` with each that Keras' own `fit` is about to train, and `on_layer` with each layer or
        model that was made."""

        def record_layer(layer: Any) -> None:
            self._layers.append(weakref.ref(layer))
            on_layer(layer)

        with (
            before_method(keras.Model, "fit", before_fit),
            _after(Trainer, "compile", on_compile),
            _after(BaseOptimizer, "__init__", lambda made: self._optimizers.append(weakref.ref(made))),
            _after(keras.layers.Layer, "__init__", record_layer),
            _after(Variable, "__init__", self._note),
        ):
            yield


def _alive(references: list[weakref.ref[Any]]) -> list[Any]:
    references[:] = [reference for reference in references if reference() is not None]
    # Once each: __init__ may run twice, of a class and of its base.
    return list({id(made): made for made in (reference() for reference in references)}.values())


@contextlib.contextmanager
def before_method(owner: type, name: str, callback: Callable[[Any], Any]) -> Iterator[None]:
    """While open, call `callback` with the object that a method of `owner` is called on."""
    where = next(base for base in owner.__mro__ if name in vars(base))
    original = getattr(where, name)

    @functools.wraps(original)
    def method(called: Any, *args: Any, **kwargs: Any) -> Any:
        callback(called)
        return original(called, *args, **kwargs)

    setattr(where, name, method)
    try:
        yield
    finally:
        setattr(where, name, original)


@contextlib.contextmanager
def _after(owner: type, name: str, callback: Callable[[Any], None]) -> Iterator[None]:
    """While open, call `callback` with the object whose method of `owner` has returned."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(made: Any, *args: Any, **kwargs: Any) -> None:
        original(made, *args, **kwargs)
        callback(made)

    # Keras reads a layer's arguments from the signature, and doesn't unwrap it everywhere.
    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
