"""A user's step in the shape of a model, so that the replicas of all backends take it as they take one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import keras

from insitu.train.custom_loop.averaging import Share, share_of
from insitu.train.custom_loop.tracing import Applied, Watch, put_off


@dataclass(frozen=True, slots=True)
class Call:
    """How `fn(*args, **kwargs)` is put together again from arrays.

    `structure` is that of (args, kwargs); `constants[i]` is the i-th leaf where it is no array. `scalars[i]`
    says that the i-th array stands for a scalar: it travels as an array of one element.
    """

    fn: Callable[..., Any]
    structure: Any
    constants: tuple[Any, ...]
    is_array: tuple[bool, ...]
    scalars: tuple[bool, ...]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        values = [a[0] if scalar else a for a, scalar in zip(arrays, self.scalars, strict=True)]
        remaining = iter(values)
        leaves = [
            next(remaining) if array else constant
            for array, constant in zip(self.is_array, self.constants, strict=True)
        ]
        args, kwargs = keras.tree.pack_sequence_as(self.structure, leaves)
        return self.fn(*args, **kwargs)


class Optimizers:
    """The optimizers of one step as if they were one: `groups` pairs each with the variables it updates."""

    def __init__(self, groups: Sequence[tuple[Any, list[Any]]]) -> None:
        self.groups = list(groups)
        self._trainable_variables = [v for _, variables in self.groups for v in variables]

    @property
    def variables(self) -> list[Any]:
        return [v for optimizer, _ in self.groups for v in optimizer.variables]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        by_variable = {id(v): g for v, g in zip(variables, grads, strict=True)}
        for optimizer, mine in self.groups:
            optimizer.apply([by_variable[id(v)] for v in mine], mine)

    def apply_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> None:
        self.apply([g for g, _ in grads_and_vars], [v for _, v in grads_and_vars])

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """As JAX has it: (values of the trainable variables, of the optimizers' variables) after it."""
        slots, gradients, weights = list(optimizer_variables), list(grads), list(trainable_variables)
        new_weights: list[Any] = []
        new_slots: list[Any] = []
        for optimizer, mine in self.groups:
            count, size = len(mine), len(optimizer.variables)
            updated = _stateless(optimizer, mine, slots[:size], gradients[:count], weights[:count])
            new_weights += updated[0]
            new_slots += updated[1]
            slots, gradients, weights = slots[size:], gradients[count:], weights[count:]
        return new_weights, new_slots


def _stateless(
    optimizer: Any, mine: list[Any], slots: list[Any], gradients: list[Any], weights: list[Any]
) -> tuple[list[Any], list[Any]]:
    own = list(optimizer._trainable_variables)
    order = {id(v): index for index, v in enumerate(mine)}
    if len(own) == len(mine):
        places = [order[id(v)] for v in own]
        new, slots = optimizer.stateless_apply(
            slots, [gradients[i] for i in places], [weights[i] for i in places]
        )
        updated = list(weights)
        for place, value in zip(places, new, strict=True):
            updated[place] = value
        return updated, list(slots)
    # Some of its variables only.
    mapping = [*zip(mine, weights, strict=True), *zip(optimizer.variables, slots, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply(gradients, mine)
    return [scope.get_current_value(v) for v in mine], [
        scope.get_current_value(v) for v in optimizer.variables
    ]


class StepModel:
    """What a replica needs of a model. Its batches are lists of arrays: rows of the step over all replicas,
    once for each row of this replica, then the arrays of the call.

    `outputs` are the tensors that the step has just returned, `result` how they are put together.
    `unmoved_variables` are only read, and stay out of the exchange.
    """

    run_eagerly = False

    def __init__(self, call: Call, optimizers: Sequence[Any], replicas: int) -> None:
        self._call = call
        self._known = list(optimizers)
        self._replicas = replicas
        # What XLA makes of a step is Keras' business in fit; a step of the user's own is compiled as it is.
        self.jit_compile = keras.backend.backend() == "jax"
        self.outputs: list[Any] = []
        self.result = Result(())
        self.optimizer = Optimizers([])
        self.trainable_variables: list[Any] = []
        self.non_trainable_variables: list[Any] = []
        self.metrics_variables: list[Any] = []
        self.unmoved_variables: list[Any] = []
        self.without_gradient: frozenset[int] = frozenset()
        self.training = True
        self._seed_generators: list[Any] = []

    @property
    def changes_anything(self) -> bool:
        return bool(self.optimizer.groups or len(self.unmoved_variables) < len(self._others))

    @property
    def variables(self) -> list[Any]:
        """All but the optimizers'."""
        return [*self.trainable_variables, *self._others]

    @property
    def _others(self) -> list[Any]:
        return [*self.non_trainable_variables, *self.metrics_variables]

    def watch(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs the step without effect and learns what it touches. Returns its outputs."""
        applied = Applied()
        watch = Watch(applied)
        with watch.opened():
            self.call(arrays, applied)
        self._learn(watch, applied)
        return self.outputs

    def _learn(self, watch: Watch, applied: Applied) -> None:
        self.optimizer = Optimizers([(optimizer, variables) for optimizer, _, variables in applied.calls])
        self.trainable_variables = applied.variables
        self.without_gradient = frozenset(i for i, g in enumerate(applied.gradients) if g is None)
        known = {id(v) for v in (*self.optimizer.variables, *self.trainable_variables)}
        read = {id(v): v for v in (*watch.read, *watch.written)}
        others = [v for key, v in read.items() if key not in known]
        written = {id(v) for v in watch.written}
        self._seed_generators = watch.seed_generators
        for variable in others:
            moved = id(variable) in written
            if moved and getattr(variable, "aggregation", None) == "sum":
                self.metrics_variables.append(variable)
            else:
                self.non_trainable_variables.append(variable)
            if not moved:
                self.unmoved_variables.append(variable)

    def call(self, arrays: Sequence[Any], applied: Applied) -> Applied:
        """Runs the user's step; what it applies is put off, and noted in `applied`."""
        rows = keras.ops.shape(arrays[0])[0]
        with share_of(Share(rows, arrays[0][0])), put_off(self._known, applied):
            self.result = Result(self._call(arrays[1:]))
        self.outputs = self.result.tensors
        return applied

    def apply_in_turn(self, applied: Applied, arrays: Sequence[Any]) -> None:
        """Gives the gradients to the optimizer of this model: scaled, so that the mean over replicas by rows
        is the sum over replicas."""
        gradients = applied.gradients
        if self._replicas > 1:
            rows = keras.ops.shape(arrays[0])[0]
            scale = arrays[0][0] / keras.ops.cast(rows, "float32")
            gradients = [None if g is None else _scaled(g, scale) for g in gradients]
        self.optimizer.apply(gradients, applied.variables)

    # As a model has it

    @property
    def metrics(self) -> list[Any]:
        return []

    def get_metrics_result(self) -> dict[str, Any]:
        return {}

    def eval(self) -> None:
        """As PyTorch's modules have it."""

    def _flatten_layers(self) -> list[Any]:
        return [SimpleNamespace(_seed_generators=self._seed_generators, named_buffers=lambda: ())]

    def train_step(self, *state_and_data: Any) -> Any:
        *state, arrays = state_and_data
        if not state:
            self.apply_in_turn(self.call(arrays, Applied()), arrays)
            return {}
        # On JAX: (state, data) in, (logs, state) out.
        groups = (
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer.variables,
            self.metrics_variables,
        )
        mapping = [
            pair
            for group, values in zip(groups, state[0], strict=True)
            for pair in zip(group, values, strict=True)
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.apply_in_turn(self.call(arrays, Applied()), arrays)
        return {}, tuple([scope.get_current_value(v) for v in group] for group in groups)


def _scaled(gradient: Any, scale: Any) -> Any:
    if hasattr(gradient, "indices"):  # TensorFlow's gradient of a few rows
        gradient = keras.ops.convert_to_tensor(gradient)
    return gradient * keras.ops.cast(scale, gradient.dtype)


class Result:
    """What a step returned, apart: `tensors`, and how they are put together with the rest."""

    def __init__(self, structure: Any) -> None:
        leaves = keras.tree.flatten(structure)
        self._is_tensor = [_is_tensor(leaf) for leaf in leaves]
        pairs = list(zip(leaves, self._is_tensor, strict=True))
        self._leaves = [None if is_tensor else leaf for leaf, is_tensor in pairs]
        self.tensors = [keras.ops.convert_to_tensor(leaf) for leaf, is_tensor in pairs if is_tensor]
        self._structure = keras.tree.map_structure(lambda leaf: None, structure)

    def rebuild(self, tensors: Sequence[Any] | None) -> Any:
        """The structure with these tensors, None in place of each where there are none."""
        remaining = iter(tensors or ())
        leaves = [
            (next(remaining) if tensors is not None else None) if is_tensor else leaf
            for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        return keras.tree.pack_sequence_as(self._structure, leaves)


def _is_tensor(leaf: Any) -> bool:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return True
    # Elsewhere a plain number is part of the trace, so it is the same in each step.
    number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
    return number and keras.backend.backend() == "torch"
