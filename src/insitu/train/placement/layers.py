"""Lets placed layers compute on their devices, and keeps their variables there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from insitu.errors import InputError, TrainingError
from insitu.train.devices import Device
from insitu.train.fit import StepExecutor
from insitu.train.placement.variables import Places, device_in
from insitu.train.replica import Logs, Part

_MARK = "_insitu_device"
_NAMED = 20
"""Layers that a message names at most."""


class Mover(Protocol):
    """What a backend does for layers on devices."""

    def lies_on(self, variable: Any, device: Device) -> bool: ...

    def move(self, variable: Any, device: Device) -> bool:
        """Puts a variable there; False where the backend can't."""

    def wrap(self, layer: Any, device: Device) -> None:
        """Makes the layer's `call` compute there."""

    def prepare(self, model: Any, optimizers: Sequence[Any], places: Places) -> None:
        """Does what is to be done for the whole model, or a step of a custom loop."""


def place_layers(model: Any, places: Places) -> Callable[[], None]:
    """Puts the layers of a built `model` on their devices, and returns a function that brings back variables
    that an update has put elsewhere.

    Raises InputError for layers that the model doesn't have, TrainingError where variables lie elsewhere and
    can't be moved.
    """
    layers = model._flatten_layers(include_self=False)
    check_places(layers, places)
    optimizers = [] if model.optimizer is None else [model.optimizer]
    return _placed(model, layers, optimizers, places)


def place_in_loop(step: Any, layers: Sequence[Any], places: Places) -> Callable[[], None]:
    """`place_layers` for the `step` of a custom loop, a `StepModel`, and the `layers` made in the strategy's
    scope: those that are built by now."""
    check_places(layers, places)
    optimizers = [optimizer for optimizer, _ in step.optimizer.groups]
    return _placed(step, layers, optimizers, places)


def check_places(layers: Sequence[Any], places: Places) -> None:
    """Raises InputError for places of layers that aren't there."""
    names = {layer.name for layer in layers}
    if unknown := sorted(places.keys() - names):
        shown = sorted(names)
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        raise InputError(
            f"Only layers of the model can be placed: {', '.join(shown[:_NAMED])}{more}. Received: "
            f"{', '.join(unknown)}. Give layers names of your own (name=...)."
        )


def _placed(
    model: Any, layers: Sequence[Any], optimizers: Sequence[Any], places: Places
) -> Callable[[], None]:
    mover = _mover()
    for layer in layers:
        device = places.get(layer.name)
        if device is not None and getattr(layer, _MARK, None) != device:
            mover.wrap(layer, device)
            object.__setattr__(layer, _MARK, device)
    mover.prepare(model, optimizers, places)
    placed = _placed_variables(layers, optimizers, places)

    def settle() -> None:
        for variable, device in placed:
            if not mover.lies_on(variable, device) and not mover.move(variable, device):
                raise TrainingError(
                    f"On {device.backend} variables stay where they were made. Received: {variable.path!r} "
                    f"somewhere else than {device.name}. Call strategy.place() before the model is made, in "
                    "its scope."
                )

    settle()
    return settle


def _placed_variables(
    layers: Sequence[Any], optimizers: Sequence[Any], places: Places
) -> list[tuple[Any, Device]]:
    """Variables of placed layers, and what the optimizer keeps for them. Seeds and metrics stay at home."""
    homes: dict[str, Device] = {}
    placed = []
    weights = {id(v): v for layer in layers for v in layer.weights}
    for variable in weights.values():
        device = device_in(variable.path, places)
        if device is not None:
            placed.append((variable, device))
            homes[variable.path.replace("/", "_") + "_"] = device
    for variable in (v for optimizer in optimizers for v in optimizer.variables):
        name = variable.path.rpartition("/")[2]
        owner = max((path for path in homes if name.startswith(path)), key=len, default=None)
        if owner is not None:
            placed.append((variable, homes[owner]))
    return placed


def _mover() -> Mover:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from insitu.train.placement.tensorflow import TensorFlowMover

        return TensorFlowMover()
    if backend == "jax":
        from insitu.train.placement.jax import JaxMover

        return JaxMover()
    from insitu.train.placement.torch import TorchMover

    return TorchMover()


class LayerwiseStep:
    """A `StepExecutor` after which every variable is back on its device."""

    def __init__(self, step: StepExecutor, settle: Callable[[], None]) -> None:
        self._step = step
        self._settle = settle
        self.test = step.test
        self.predict = step.predict
        self.example_output = step.example_output

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        logs = self._step.train(parts, at)
        self._settle()
        return logs
