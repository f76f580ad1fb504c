"""The variables of a model, laid out over a mesh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from insitu.train.spmd.layout import MeshLayout

GROUPS = 4
"""Trainable, non-trainable, optimizer's and metrics' variables, as Keras' JAX trainer has them."""
TRAINABLE, OTHERS, OPTIMIZER, METRICS = range(GROUPS)

_ATTRIBUTE = "_insitu_laid"

_made: weakref.WeakKeyDictionary[Any, MeshVariables] = weakref.WeakKeyDictionary()


class MeshVariables:
    """Takes values out of Keras variables for the program, and puts them back.

    Between steps the variables hold the truth, where callbacks, checkpoints and users find and change it.
    Where the mesh spans processes, a variable holds this process' view, with which it can compute alone, and
    the array of the program is kept beside it. A value that somebody else has assigned is recognised by being
    another object, and laid out anew; it must be the same in each task.
    """

    def __init__(self, model: Any, layout: MeshLayout) -> None:
        self.layout = layout
        self._variables = _variables_of(model)
        self.shardings: tuple[list[NamedSharding], ...] = tuple(
            [layout.sharding_of(v.value) for v in group] for group in self._variables
        )

    def fits(self, model: Any, layout: MeshLayout) -> bool:
        """Whether this is about the variables that `model` has now."""
        now = _variables_of(model)
        return self.layout == layout and all(
            len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            for new, old in zip(now, self._variables, strict=True)
        )

    def take(self, group: int) -> list[Any]:
        """The values of a group as arrays of the program."""
        return [self._taken(group, index) for index in range(len(self._variables[group]))]

    def _taken(self, group: int, index: int) -> Any:
        variable = self._variables[group][index]
        laid: _Laid | None = getattr(variable, _ATTRIBUTE, None)
        if laid is None or variable._value is not laid.view or laid.layout != self.layout:
            # By the getter: the variable may not have been given its first value yet.
            return self._set(variable, self.layout.place(variable.value, self.shardings[group][index]))
        return laid.value

    def put(self, group: int, values: Sequence[jax.Array]) -> None:
        """Gives the variables of a group what the program has made of them."""
        for variable, value in zip(self._variables[group], values, strict=True):
            self._set(variable, value)

    def _set(self, variable: Any, value: jax.Array) -> jax.Array:
        view = self.layout.view(value)
        variable._direct_assign(view)
        # Kept by the variable, not here: several programs may use it, a custom loop's steps say.
        object.__setattr__(variable, _ATTRIBUTE, _Laid(self.layout, variable._value, value))
        return value


@dataclass(frozen=True, slots=True)
class _Laid:
    """A value of a program over `layout`, and what its variable was given as a view of it."""

    layout: MeshLayout
    view: Any
    value: jax.Array


def variables_over(model: Any, layout: MeshLayout) -> MeshVariables:
    """The variables of `model` over `layout`: one for all of its steps, so that each is laid out once."""
    made = _made.get(model)
    if made is None or not made.fits(model, layout):
        made = _made[model] = MeshVariables(model, layout)
    return made


def _variables_of(model: Any) -> tuple[list[Any], ...]:
    optimizer = getattr(model, "optimizer", None)
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(optimizer.variables) if optimizer is not None else [],
        list(model.metrics_variables),
    )
