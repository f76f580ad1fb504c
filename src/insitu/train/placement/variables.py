"""Makes the variables of layers where the layers are placed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
from keras.src.backend.common.name_scope import current_path
from keras.src.optimizers.base_optimizer import BaseOptimizer

from insitu.train.devices import Device

Places = Mapping[str, Device]


def device_in(path: str, places: Places) -> Device | None:
    """Where a path of names leads: to the device of the innermost layer that has a place."""
    return next((places[name] for name in reversed(path.split("/")) if name in places), None)


@contextlib.contextmanager
def making_layers_on(places: Places) -> Iterator[None]:
    """While open, layers make their weights, and optimizers what they keep for them, on the layers'
    devices."""
    add_weight, add_like = keras.layers.Layer.add_weight, BaseOptimizer.add_variable_from_reference

    def on(path: str) -> contextlib.AbstractContextManager[Any]:
        device = device_in(path, places)
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
