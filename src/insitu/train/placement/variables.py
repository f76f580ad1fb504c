"""Make the variables of layers on the devices of the layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
from keras.src.backend.common.name_scope import current_path
from keras.src.optimizers.base_optimizer import BaseOptimizer

from insitu.train.devices import Device

Placements = Mapping[str, Device]


def find_device(path: str, placements: Placements) -> Device | None:
    """Return the device of the innermost placed layer in a path of names, or None."""
    return next((placements[name] for name in reversed(path.split("/")) if name in placements), None)


@contextlib.contextmanager
def place_new_variables(placements: Placements) -> Iterator[None]:
    """While open, layers make their weights, and optimizers the variables for these, on the layers'
    devices."""
    add_weight, add_like = keras.layers.Layer.add_weight, BaseOptimizer.add_variable_from_reference

    def on(path: str) -> contextlib.AbstractContextManager[Any]:
        device = find_device(path, placements)
        return device.scope() if device is not None else contextlib.nullcontext()

    def add_weight_there(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with on(f"{current_path()}/{layer.name}"):
            return add_weight(layer, *args, **kwargs)

    def add_like_there(optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with on(reference_variable.path):
            return add_like(optimizer, reference_variable, *args, **kwargs)

    keras.layers.Layer.add_weight = add_weight_there
    BaseOptimizer.add_variable_from_reference = add_like_there
    try:
        yield
    finally:
        keras.layers.Layer.add_weight = add_weight
        BaseOptimizer.add_variable_from_reference = add_like
