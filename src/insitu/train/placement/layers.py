"""Let placed layers compute on their devices, and keep their variables there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from insitu.base.errors import InputError, TrainingError
from insitu.train.backends import active_backend
from insitu.train.devices import Device
from insitu.train.elastic import LoopPosition
from insitu.train.fit import StepExecutor
from insitu.train.placement.variables import Placements, find_device
from insitu.train.replica import Logs, ShardBatch

_DEVICE_ATTRIBUTE = "_insitu_device"
_MAX_NAMES_SHOWN = 20
"""Layers that a message names at most."""


class DeviceMover(Protocol):
    """Moves layers and variables to devices, on one backend."""

    def is_on(self, variable: Any, device: Device) -> bool: ...

    def move(self, variable: Any, device: Device) -> bool:
        """Move a variable there. Returns False if the backend can't."""

    def wrap(self, layer: Any, device: Device) -> None:
        """Make the layer's `call` compute there."""

    def prepare(self, model: Any, optimizers: Sequence[Any], placements: Placements) -> None:
        """Do what the whole model, or a step of a custom loop, needs."""


def place_layers(model: Any, placements: Placements) -> Callable[[], None]:
    """Put the layers of a built `model` on their devices. Returns a function that moves back variables that
    an update has moved elsewhere.

    Raises InputError for layers that the model doesn't have, TrainingError if variables are elsewhere and
    can't be moved.
    """
    layers = model._flatten_layers(include_self=False)
    check_placements(layers, placements)
    optimizers = [] if model.optimizer is None else [model.optimizer]
    return _place(model, layers, optimizers, placements)


def place_loop_layers(step: Any, layers: Sequence[Any], placements: Placements) -> Callable[[], None]:
    """Do as `place_layers` for the `step` of a custom loop, a `StepModel`, and for those `layers` of the
    strategy's scope that are built by now."""
    check_placements(layers, placements)
    optimizers = [optimizer for optimizer, _ in step.optimizer.groups]
    return _place(step, layers, optimizers, placements)


def check_placements(layers: Sequence[Any], placements: Placements) -> None:
    """Raise InputError for a placement of a layer that the model doesn't have."""
    names = {layer.name for layer in layers}
    if unknown := sorted(placements.keys() - names):
        shown = sorted(names)
        more = f" and {len(shown) - _MAX_NAMES_SHOWN} more" if len(shown) > _MAX_NAMES_SHOWN else ""
        raise InputError(
            f"Only layers of the model can be placed: {', '.join(shown[:_MAX_NAMES_SHOWN])}{more}. Received: "
            f"{', '.join(unknown)}. Give layers names of your own (name=...)."
        )


def _place(
    model: Any, layers: Sequence[Any], optimizers: Sequence[Any], placements: Placements
) -> Callable[[], None]:
    mover: DeviceMover = active_backend().make_device_mover()
    for layer in layers:
        device = placements.get(layer.name)
        if device is not None and getattr(layer, _DEVICE_ATTRIBUTE, None) != device:
            mover.wrap(layer, device)
            object.__setattr__(layer, _DEVICE_ATTRIBUTE, device)
    mover.prepare(model, optimizers, placements)
    placed = _find_placed_variables(layers, optimizers, placements)

    def restore() -> None:
        for variable, device in placed:
            if not mover.is_on(variable, device) and not mover.move(variable, device):
                raise TrainingError(
                    f"On {device.backend} variables stay where they were made. Received: {variable.path!r} "
                    f"somewhere else than {device.name}. Call strategy.place() before the model is made, in "
                    "its scope."
                )

    restore()
    return restore


def _find_placed_variables(
    layers: Sequence[Any], optimizers: Sequence[Any], placements: Placements
) -> list[tuple[Any, Device]]:
    """Return the variables of placed layers, and the optimizers' variables for them. Seeds and metrics stay
    at home."""
    homes: dict[str, Device] = {}
    placed = []
    weights = {id(v): v for layer in layers for v in layer.weights}
    for variable in weights.values():
        device = find_device(variable.path, placements)
        if device is not None:
            placed.append((variable, device))
            homes[variable.path.replace("/", "_") + "_"] = device
    for variable in (v for optimizer in optimizers for v in optimizer.variables):
        name = variable.path.rpartition("/")[2]
        owner = max((path for path in homes if name.startswith(path)), key=len, default=None)
        if owner is not None:
            placed.append((variable, homes[owner]))
    return placed


class PlacedLayersStep:
    """A `StepExecutor` after which every variable is back on its device."""

    def __init__(self, step: StepExecutor, restore: Callable[[], None]) -> None:
        self._step = step
        self._restore = restore
        self.test = step.test
        self.predict = step.predict
        self.example_output = step.example_output

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        logs = self._step.train(position, parts, report)
        self._restore()
        return logs
