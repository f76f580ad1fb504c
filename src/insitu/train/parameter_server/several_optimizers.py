"""What servers do to a model's variables: by one optimizer, or by several, each for its own variables
(`keras.optimizers.MultiOptimizer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.parameters import FinalizingUpdater, InitialisingUpdater, Updater
from insitu.train.parameter_server.model_spec import (
    STATE_PREFIX,
    can_be_split,
    clip_norms_of,
    needs_one_server,
    updater_config,
)

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """How servers update variables."""

    #: The configuration of the updater, as plain values.
    config: dict[str, Any]
    #: Whether parts of a variable may be updated apart.
    can_be_split: bool
    #: Whether one server must have all variables.
    together: bool
    #: Whether the variables' last values are averages.
    finalizes: bool
    #: The optimizers of a MultiOptimizer; empty for any other.
    members: tuple[Any, ...] = ()


def describe_update(optimizer: Any, variables: Mapping[str, Any], *, exact: bool, jit: bool) -> ServerUpdate:
    """Return how servers update `variables`, by name, as `optimizer` would. See `updater_config`.

    Norms that a member of a MultiOptimizer bounds are those of its own variables, so the servers bound them,
    also where a worker does otherwise.
    """
    if not has_several(optimizer):
        return ServerUpdate(
            updater_config(optimizer, exact=exact, jit=jit),
            can_be_split(optimizer),
            needs_one_server(optimizer, exact=exact),
            bool(optimizer.use_ema),
        )
    chosen = {
        name: optimizer._optimizer_map(variable)
        for name, variable in variables.items()
        if not name.startswith(STATE_PREFIX)
    }
    members = list({id(member): member for member in chosen.values()}.values())
    numbers = {id(member): number for number, member in enumerate(members)}
    several = [
        updater_config(member, exact=exact or bool(clip_norms_of(member)), jit=jit) for member in members
    ]
    config = {
        "state": "assign" if exact else "average",
        "several": several,
        "of": {name: numbers[id(member)] for name, member in chosen.items()},
    }
    together = any(needs_one_server(member, exact=True) for member in members)
    finalizes = any(member.use_ema for member in members)
    return ServerUpdate(config, False, together, finalizes, tuple(members))


def has_several(optimizer: Any) -> bool:
    """Return whether an optimizer leaves each variable to one of several."""
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # Keras has it since 3.13
    return kind is not None and isinstance(optimizer, kind)


class SeveralUpdaters:
    """Leaves each variable to one of several updaters: `of` has its number by the variable's name."""

    elementwise = False

    def __init__(self, updaters: Sequence[Updater], of: Mapping[str, int]) -> None:
        self._updaters = updaters
        self._of = of

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        return self._updaters[self._of[name]].slots(name, shape, dtype)

    def row_slots(self) -> dict[str, float]:
        raise NotImplementedError("Rows of tables have updaters of their own.")

    def update(self, values: Arrays, gradients: Arrays, slots: Mapping[str, Arrays], step: int) -> None:
        for updater, own in self._divide(values):
            updater.update(own, gradients, slots, step)

    def initialise(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        for updater, own in self._divide(values):
            if isinstance(updater, InitialisingUpdater):
                updater.initialise(own, slots)

    def finalize(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        for updater, own in self._divide(values):
            if isinstance(updater, FinalizingUpdater):
                updater.finalize(own, slots)

    def _divide(self, values: Arrays) -> list[tuple[Updater, Arrays]]:
        """Return each updater that has variables here, with them."""
        parts: dict[int, dict[str, NDArray[Any]]] = {}
        for name, value in values.items():
            parts.setdefault(self._of[name], {})[name] = value
        return [(self._updaters[number], own) for number, own in sorted(parts.items())]

    def update_rows(self, values: NDArray[Any], gradients: NDArray[Any], slots: Arrays, step: int) -> None:
        raise NotImplementedError("Rows of tables have updaters of their own.")
