"""What the layers that a step calls, and its optimizers, read of Python: that is compiled, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from insitu.train.custom_loop.scope import before_method
from insitu.train.custom_loop.step_identity import (
    PLAIN,
    find_own_attributes,
    identify_step,
    is_of_library,
    name_changes,
)


class UsedObjects:
    """Layers and optimizers, and the plain values that they had while a step was traced.

    Of a layer of the script these are all that its `call` reads, of one of a library the attributes that its
    `call` names, such as the rate of Dropout. A walk through all that a large model's layers read would cost
    milliseconds in each step.
    """

    def __init__(self) -> None:
        #: by id, each once
        self._layers: dict[int, Any] = {}
        #: the calls of the script's layers, with their keys
        self._calls: list[tuple[Any, Any]] = []
        #: (attributes of a layer or optimizer, name of one, its value, the name of its owner)
        self._values: list[tuple[dict[str, Any], str, Any, str]] = []
        #: what keys name by its id
        self._objects: list[Any] = []

    @contextlib.contextmanager
    def record_layers(self) -> Iterator[None]:
        """While open, note the layers that are called."""
        with before_method(
            keras.layers.Layer, "__call__", lambda layer: self._layers.setdefault(id(layer), layer)
        ):
            yield

    def keep_values(self, optimizers: Iterable[Any]) -> None:
        """Remember the values of the layers that were called, and of these optimizers."""
        for layer in self._layers.values():
            function = getattr(layer.call, "__func__", None)
            if function is None:
                continue
            if is_of_library(function):
                self._keep(layer, find_own_attributes(function.__code__))
            else:
                key, objects = identify_step(layer.call)
                self._calls.append((layer.call, key))
                self._objects += objects
        for optimizer in optimizers:
            self._keep(optimizer, [name for name in vars(optimizer) if not name.startswith("_")])

    def _keep(self, owner: Any, names: Iterable[str]) -> None:
        own = vars(owner)
        self._objects.append(owner)
        self._values += [(own, n, own[n], owner.name) for n in names if isinstance(own.get(n, owner), PLAIN)]

    def are_as_kept(self) -> bool:
        """Return whether all values are those that were remembered."""
        is_kept = next(self._find_changed(), None) is None
        return is_kept and all(identify_step(call)[0] == key for call, key in self._calls)

    def name_changes(self) -> list[str]:
        """Return the names of the values that aren't."""
        names = list(self._find_changed())
        return names + [n for call, key in self._calls for n in name_changes(key, identify_step(call)[0])]

    def _find_changed(self) -> Iterator[str]:
        for own, name, value, owner in self._values:
            now = own.get(name)
            if now is not value and now != value:  # NaN, such as of Masking, doesn't equal itself
                yield f"{owner}.{name}"
