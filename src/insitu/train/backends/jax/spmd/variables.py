"""The variables of a model, sharded over a mesh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from insitu.train.backends.jax.replica import variables_of
from insitu.train.backends.jax.spmd.mesh_sharding import MeshSharding

GROUPS = 4
"""Trainable, non-trainable, optimizer's and metrics' variables, as Keras' JAX trainer has them."""
TRAINABLE, OTHERS, OPTIMIZER, METRICS = range(GROUPS)

_ATTRIBUTE = "_insitu_sharded"

_made: weakref.WeakKeyDictionary[Any, MeshVariables] = weakref.WeakKeyDictionary()


class MeshVariables:
    """Takes values out of Keras variables for the program, and puts them back.

    Between steps the variables hold the current values, where callbacks, checkpoints and users read and set
    them.
    If the mesh spans processes, a variable holds this process' view, with which it can compute alone, and
    the array of the program is kept beside it. A value that was assigned outside the program is another
    object, and is sharded again; it must be the same in each task.
    """

    def __init__(self, model: Any, mesh_sharding: MeshSharding) -> None:
        self.mesh_sharding = mesh_sharding
        self._variables = variables_of(model)
        self.shardings: tuple[list[NamedSharding], ...] = tuple(
            [mesh_sharding.sharding_of(v.value) for v in group] for group in self._variables
        )

    def matches(self, model: Any, mesh_sharding: MeshSharding) -> bool:
        """Return True if these are the variables that `model` has now."""
        now = variables_of(model)
        return self.mesh_sharding == mesh_sharding and all(
            len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))
            for new, old in zip(now, self._variables, strict=True)
        )

    def take(self, group: int) -> list[Any]:
        """Return the values of a group as arrays of the program."""
        return [self._take(group, index) for index in range(len(self._variables[group]))]

    def _take(self, group: int, index: int) -> Any:
        variable = self._variables[group][index]
        sharded: _ShardedValue | None = getattr(variable, _ATTRIBUTE, None)
        if (
            sharded is None
            or variable._value is not sharded.view
            or sharded.mesh_sharding != self.mesh_sharding
        ):
            # By the getter: the variable may not have been given its first value yet.
            return self._set(variable, self.mesh_sharding.place(variable.value, self.shardings[group][index]))
        return sharded.value

    def put(self, group: int, values: Sequence[jax.Array]) -> None:
        """Set the variables of a group to results of the program."""
        for variable, value in zip(self._variables[group], values, strict=True):
            self._set(variable, value)

    def _set(self, variable: Any, value: jax.Array) -> jax.Array:
        view = self.mesh_sharding.view(value)
        variable._direct_assign(view)
        # An attribute of the variable, because several programs may use it, such as steps of a custom loop.
        object.__setattr__(variable, _ATTRIBUTE, _ShardedValue(self.mesh_sharding, variable._value, value))
        return value


@dataclass(frozen=True, slots=True)
class _ShardedValue:
    """A value of a variable in a program."""

    mesh_sharding: MeshSharding
    """How it is sharded."""
    view: Any
    """This process' view of it, which is the variable's value in Keras."""
    value: jax.Array
    """The array of the program."""


def get_mesh_variables(model: Any, mesh_sharding: MeshSharding) -> MeshVariables:
    """Return the variables of `model` over `mesh_sharding`: one object for all of its steps, so that each
    variable is sharded once."""
    made = _made.get(model)
    if made is None or not made.matches(model, mesh_sharding):
        made = _made[model] = MeshVariables(model, mesh_sharding)
    return made
