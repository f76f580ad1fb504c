"""Present a user's step as a model, so that the replicas of all backends can run it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import keras
from keras.src.backend.common.variables import Variable

from insitu.train.backends import active_backend
from insitu.train.collectives import pack_leaves
from insitu.train.custom_loop.averaging import Share, share_scope
from insitu.train.custom_loop.tracing import DeferredUpdates, VariableTracer, defer_apply
from insitu.train.replica import is_floating


@dataclass(frozen=True, slots=True)
class BoundCall:
    """Calls `fn(*args, **kwargs)` with arguments rebuilt from arrays."""

    fn: Callable[..., Any]
    """The user's step."""
    structure: Any
    """The structure of (args, kwargs)."""
    constants: tuple[Any, ...]
    """For each leaf its value, None for an array."""
    is_array: tuple[bool, ...]
    """For each leaf: True if it is an array."""
    scalars: tuple[bool, ...]
    """For each array: True if it stands for a scalar, which travels as an array of one element."""

    def __call__(self, arrays: Sequence[Any]) -> Any:
        values = [a[0] if scalar else a for a, scalar in zip(arrays, self.scalars, strict=True)]
        remaining = iter(values)
        leaves = [
            next(remaining) if array else constant
            for array, constant in zip(self.is_array, self.constants, strict=True)
        ]
        args, kwargs = pack_leaves(self.structure, leaves)
        return self.fn(*args, **kwargs)


class CombinedOptimizer:
    """Presents the optimizers of one step as one."""

    def __init__(self, groups: Sequence[tuple[Any, list[Any]]]) -> None:
        self.groups = list(groups)
        """(optimizer, the variables that it updates)."""
        self._trainable_variables = [v for _, variables in self.groups for v in variables]

    @property
    def variables(self) -> list[Any]:
        return [v for optimizer, _ in self.groups for v in optimizer.variables]

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        by_variable = {id(v): g for v, g in zip(variables, grads, strict=True)}
        for optimizer, own in self.groups:
            optimizer.apply([by_variable[id(v)] for v in own], own)

    def apply_gradients(self, grads_and_vars: Sequence[tuple[Any, Any]]) -> None:
        self.apply([g for g, _ in grads_and_vars], [v for _, v in grads_and_vars])

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return (new values of the trainable variables, of the optimizers' variables), as JAX needs it."""
        slots, gradients, weights = list(optimizer_variables), list(grads), list(trainable_variables)
        new_weights: list[Any] = []
        new_slots: list[Any] = []
        for optimizer, own in self.groups:
            count, size = len(own), len(optimizer.variables)
            updated = _stateless(optimizer, own, slots[:size], gradients[:count], weights[:count])
            new_weights += updated[0]
            new_slots += updated[1]
            slots, gradients, weights = slots[size:], gradients[count:], weights[count:]
        return new_weights, new_slots


def _stateless(
    optimizer: Any, own: list[Any], slots: list[Any], gradients: list[Any], weights: list[Any]
) -> tuple[list[Any], list[Any]]:
    known = list(optimizer._trainable_variables)
    order = {id(v): index for index, v in enumerate(own)}
    if len(known) == len(own):
        indices = [order[id(v)] for v in known]
        new, slots = optimizer.stateless_apply(
            slots, [gradients[i] for i in indices], [weights[i] for i in indices]
        )
        updated = list(weights)
        for index, value in zip(indices, new, strict=True):
            updated[index] = value
        return updated, list(slots)
    # The step updates only some of the optimizer's variables.
    mapping = [*zip(own, weights, strict=True), *zip(optimizer.variables, slots, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply(gradients, own)
    return [scope.get_current_value(v) for v in own], [
        scope.get_current_value(v) for v in optimizer.variables
    ]


class StepModel:
    """The parts of a model's interface that a replica needs. Its batches are lists of arrays. The first
    has a row (rows of the step over all replicas, number of this replica, replicas with rows) for each row of
    this replica; the arrays of the call follow.

    `trace` fills in the variables and optimizers that the step touches.
    """

    run_eagerly = False

    def __init__(
        self, call: BoundCall, optimizers: Sequence[Any], replicas: int, strategy: Any = None
    ) -> None:
        self._call = call
        self._strategy = strategy
        self._known = list(optimizers)
        self._replicas = replicas
        # In fit Keras decides on compilation by XLA. A user's own step is compiled on JAX only.
        self.jit_compile = active_backend().compiles_loops
        self.outputs: list[Any] = []
        """The tensors that the step has just returned."""
        self.result = StepResult(())
        """The structure of these tensors."""
        self.optimizer = CombinedOptimizer([])
        self.trainable_variables: list[Any] = []
        self.non_trainable_variables: list[Any] = []
        self.metrics_variables: list[Any] = []
        self.unmoved_variables: list[Any] = []
        """Variables that the step only reads. They stay out of the exchange."""
        self.plain_means: list[Any] = []
        """Moved variables of no layer, of which each replica counts the same, whatever rows it has."""
        self.without_gradient: frozenset[int] = frozenset()
        """Indices of the trainable variables on which the loss doesn't depend."""
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

    def rewrite(self, convert: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Run what `convert` makes of the user's function from now on."""
        self._call = replace(self._call, fn=convert(self._call.fn))

    def trace(
        self, arrays: Sequence[Any], leave_trace: Callable[[], Any] = contextlib.nullcontext
    ) -> list[Any]:
        """Run the step without effect and record the variables, seeds and optimizers that it touches. Returns
        its outputs. `leave_trace` is as in `VariableTracer`."""
        deferred = DeferredUpdates()
        trace = VariableTracer(deferred, leave_trace)
        with trace.track():
            self.call(arrays, deferred)
        self._record_trace(trace, deferred)
        return self.outputs

    def _record_trace(self, trace: VariableTracer, deferred: DeferredUpdates) -> None:
        self.optimizer = CombinedOptimizer(
            [(optimizer, variables) for optimizer, _, variables in deferred.calls]
        )
        self.trainable_variables = deferred.variables
        self.without_gradient = frozenset(i for i, g in enumerate(deferred.gradients) if g is None)
        known = {id(v) for v in (*self.optimizer.variables, *self.trainable_variables)}
        read = {id(v): v for v in (*trace.read, *trace.written)}
        others = [v for key, v in read.items() if key not in known]
        written = {id(v) for v in trace.written}
        self._seed_generators = trace.seed_generators
        for variable in others:
            moved = id(variable) in written
            if moved and getattr(variable, "aggregation", None) == "sum":
                self.metrics_variables.append(variable)
            else:
                self.non_trainable_variables.append(variable)
            if not moved:
                self.unmoved_variables.append(variable)
        self._choose_plain_means([v for v in self.non_trainable_variables if id(v) in written])

    def _choose_plain_means(self, moved: Sequence[Any]) -> None:
        """Choose the moved variables that are averaged over replicas as tf.distribute does it. Averages that
        layers keep, such as BatchNorm's, are of rows."""
        if self._replicas > 1 and self._strategy is not None:
            own = {id(v) for layer in self._strategy.created_in_scope.layers for v in layer.variables}
            averaged = [v for v in moved if is_floating(v) and v.aggregation in ("mean", "none")]
            self.plain_means = [v for v in averaged if id(v) not in own]

    def call(self, arrays: Sequence[Any], deferred: DeferredUpdates) -> DeferredUpdates:
        """Run the user's step. Its updates are recorded in `deferred` instead of applied."""
        rows = keras.ops.shape(arrays[0])[0]
        replica_id = keras.ops.cast(arrays[0][0, 1], "int32")
        share = Share(rows, arrays[0][0, 0], replica_id, self._strategy)
        shards = () if self._strategy is None else self._strategy.membership.context.shards
        first = next(iter(shards), 0)
        before = [keras.ops.copy(keras.ops.convert_to_tensor(v)) for v in self.plain_means]
        summaries = active_backend().record_summaries(replica_id, first)
        with share_scope(share), defer_apply(self._known, deferred), summaries:
            self.result = StepResult(self._call(arrays[1:]))
        self._weigh_plain_means(before, rows, arrays[0][0])
        self.outputs = self.result.tensors
        return deferred

    def _weigh_plain_means(self, before: Sequence[Any], rows: Any, share: Any) -> None:
        """Scale what the step has made of these variables so that the mean over replicas by rows is the mean
        over all replicas. Those without rows leave a variable as it was `before`."""
        for variable, old in zip(self.plain_means, before, strict=True):
            step_rows, _, active = (keras.ops.cast(share[i], variable.dtype) for i in range(3))
            scale = step_rows / (keras.ops.cast(rows, variable.dtype) * self._replicas)
            idle = (self._replicas - active) / active
            variable.assign((keras.ops.convert_to_tensor(variable) + old * idle) * scale)

    def apply_in_turn(self, deferred: DeferredUpdates, arrays: Sequence[Any]) -> None:
        """Give the gradients to the optimizer of this model, scaled so that their mean over replicas by rows
        is the sum over replicas."""
        gradients = deferred.gradients
        if self._replicas > 1:
            rows = keras.ops.shape(arrays[0])[0]
            scale = arrays[0][0, 0] / keras.ops.cast(rows, "float32")
            gradients = [None if g is None else _scaled(g, scale) for g in gradients]
        self.optimizer.apply(gradients, deferred.variables)

    # As a model has it

    @property
    def metrics(self) -> list[Any]:
        return []

    def get_metrics_result(self) -> dict[str, Any]:
        return {}

    def eval(self) -> None:
        """Do nothing, as replicas for PyTorch call it."""

    def _flatten_layers(self) -> list[Any]:
        return [SimpleNamespace(_seed_generators=self._seed_generators, named_buffers=lambda: ())]

    def train_step(self, *state_and_data: Any) -> Any:
        *state, arrays = state_and_data
        if not state:
            self.apply_in_turn(self.call(arrays, DeferredUpdates()), arrays)
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
            self.apply_in_turn(self.call(arrays, DeferredUpdates()), arrays)
        return {}, tuple([scope.get_current_value(v) for v in group] for group in groups)


def _scaled(gradient: Any, scale: Any) -> Any:
    if hasattr(gradient, "indices"):  # TensorFlow's gradient of a few rows
        gradient = keras.ops.convert_to_tensor(gradient)
    return gradient * keras.ops.cast(scale, gradient.dtype)


class StepResult:
    """The return value of a step: its tensors, and the structure around them."""

    def __init__(self, structure: Any) -> None:
        leaves = keras.tree.flatten(structure)
        self._is_tensor = [_is_tensor(leaf) for leaf in leaves]
        pairs = list(zip(leaves, self._is_tensor, strict=True))
        self._leaves = [None if is_tensor else leaf for leaf, is_tensor in pairs]
        self.tensors = [_to_tensor(leaf) for leaf, is_tensor in pairs if is_tensor]
        self._structure = keras.tree.map_structure(lambda leaf: None, structure)

    def rebuild(self, tensors: Sequence[Any] | None) -> Any:
        """Return the structure with these tensors. Without any, for a replica without rows: with an empty
        array in place of a tensor that is known to have a row for each of the batch, None for another."""
        remaining = iter(map(_empty_like, self.tensors) if tensors is None else tensors)
        leaves = [
            next(remaining) if is_tensor else leaf
            for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        return pack_leaves(self._structure, leaves)


def _to_tensor(leaf: Any) -> Any:
    # Keras takes a variable for a tensor: it would be read after the step, and past what watches reads.
    return keras.ops.convert_to_tensor(leaf.value if isinstance(leaf, Variable) else leaf)


def _empty_like(tensor: Any) -> Any:
    shape = () if getattr(tensor.shape, "rank", 0) is None else tuple(tensor.shape)
    if shape[:1] != (None,) or None in shape[1:]:
        return None
    return keras.ops.zeros((0, *shape[1:]), keras.backend.standardize_dtype(tensor.dtype))


def _is_tensor(leaf: Any) -> bool:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return True
    number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
    return number and active_backend().has_numbers_in_steps
