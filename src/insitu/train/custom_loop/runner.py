"""`strategy.run`: run a user's step as a two-phase step over the replicas of all tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras
import numpy as np
from keras.src.backend.common.variables import Variable
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.backends import active_backend
from insitu.train.custom_loop.per_replica import (
    PerReplica,
    is_of_batch,
    merge_per_replica,
    values_per_replica,
)
from insitu.train.custom_loop.scope import CreationTracker
from insitu.train.custom_loop.step_identity import MISSING, identify_constant, identify_step, name_changes
from insitu.train.custom_loop.step_model import BoundCall, StepModel
from insitu.train.custom_loop.steps import LoopStep
from insitu.train.custom_loop.used_objects import UsedObjects
from insitu.train.devices import log_variables
from insitu.train.elastic import Membership
from insitu.train.replica import ShardBatch

MAX_COMPILED_STEPS = 64
"""Compiled steps that are kept. So many calls in a row that each need another one are an error."""


class LoopAggregation(Protocol):
    """How the gradients of a custom loop's replicas are combined."""

    replicas: int
    """Replicas whose gradients are summed; 1 if each replica's gradient is a mean of its own."""

    def count_step_rows(self, rows: Sequence[int]) -> tuple[list[int], int]:
        """Return the number of rows that the step is about, for each replica of this task, which has
        `rows[i]` rows itself, and the number of replicas that have rows. Collective."""

    def synchronize(self, variables: Sequence[Any]) -> None:
        """Give all replicas the values of rank 0. Collective."""


class LoopStrategy(Protocol):
    """The part of a strategy that a runner uses."""

    @property
    def membership(self) -> Membership:
        """Who this process is among the tasks."""

    def loop_aggregation(self) -> LoopAggregation:
        """Return how the gradients of the replicas are combined."""

    def placement(self) -> AbstractContextManager[Any]:
        """Return the scope in which variables are made and steps are run."""

    @property
    def created_in_scope(self) -> CreationTracker:
        """The optimizers, layers and variables that were created in the strategy's scope."""

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        """Return what runs `model`, which has been traced, for arrays like `example`."""


class LoopRunner:
    """Compiles each step once for each structure, dtypes and shapes of its arguments, and runs it."""

    def __init__(self, strategy: LoopStrategy) -> None:
        self._strategy = strategy
        self._aggregation = strategy.loop_aggregation()
        #: By the key of their calls, those that were used last at the end.
        self._programs: dict[Any, list[_CompiledStep]] = {}
        self._compiled_in_a_row = 0
        self._synchronized: set[int] = set()
        #: Runs that have updated variables by an optimizer.
        self.updates = 0

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `Strategy.run`."""
        active_backend().leave_graph("strategy.run")
        with self._strategy.placement(), self._strategy.membership.explain_loss("run"):
            return self._run(fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # A tf.function would hide its step behind another trace.
        fn = getattr(fn, "python_function", fn)
        shards = self._strategy.membership.context.shards
        arguments = _Arguments(fn, tuple(args), dict(kwargs), len(shards))
        key = arguments.key, self._strategy.created_in_scope.find_frozen()
        known = self._programs.pop(key, [])
        program = next((each for each in known if each.used.are_as_kept()), None)
        self._compiled_in_a_row = self._compiled_in_a_row + 1 if program is None else 0
        if program is None:
            if self._compiled_in_a_row > MAX_COMPILED_STEPS:
                raise TrainingError(
                    "A step is compiled for each structure and shape of its arguments, and for each value of "
                    f"Python that it reads. Received: {self._compiled_in_a_row} calls in a row that differ"
                    f"{self._name_changes(arguments, known)}. "
                    "Give run() the same function each time, which uses the same objects; numbers that "
                    "change as arguments that are NumPy scalars; arrays that differ in their first axis only."
                )
            program = _CompiledStep(self._strategy, self._aggregation, arguments)
            self._synchronize(program.model)
            if sum(map(len, self._programs.values())) + len(known) >= MAX_COMPILED_STEPS:
                (self._programs.pop(next(iter(self._programs))) if self._programs else known).clear()
        # At the end: those that are dropped are those that were used longest ago.
        self._programs[key] = [*(each for each in known if each is not program), program]
        result = program.run(arguments)
        self.updates += bool(program.model.optimizer.groups)
        return result

    def _name_changes(self, arguments: _Arguments, known: Sequence[_CompiledStep]) -> str:
        """Return which values of Python differ from those of the step that was compiled last, as far as they
        have names."""
        names = known[-1].used.name_changes() if known else []
        if not known and self._programs:
            names = name_changes(next(reversed(self._programs))[0][0], arguments.key[0])
        return f" ({', '.join(list(dict.fromkeys(names))[:3])})" if names else ""

    def _synchronize(self, model: StepModel) -> None:
        """Give all replicas the variables of rank 0 that a step uses for the first time. Collective."""
        variables = [
            *model.trainable_variables,
            *model.non_trainable_variables,
            *model.metrics_variables,
            *model.optimizer.variables,
        ]
        new = [v for v in variables if id(v) not in self._synchronized]
        if new:
            log_variables(new)
            self._synchronized.update(map(id, new))
            self._aggregation.synchronize(new)


class _Arguments:
    """The arguments of one call, for each replica of this process."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int
    ) -> None:
        leaves = keras.tree.flatten((args, kwargs))
        is_array = tuple(_is_array(leaf) for leaf in leaves)
        columns = [
            _fill_missing([_as_array(v) for v in values_per_replica(leaf, replicas)])
            for leaf, array in zip(leaves, is_array, strict=True)
            if array
        ]
        scalars = tuple(len(column[0].shape) == 0 for column in columns)
        self._columns = [
            [np.asarray(v).reshape(1) for v in column] if scalar else column
            for column, scalar in zip(columns, scalars, strict=True)
        ]
        self.rows = self._count_rows(
            [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], scalars, replicas
        )
        constants = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
        self.call = BoundCall(
            fn,
            keras.tree.map_structure(lambda leaf: None, (args, kwargs)),
            constants,
            is_array,
            scalars,
        )
        specs = tuple((tuple(c[0].shape[1:]), str(c[0].dtype)) for c in self._columns)
        structure = str(keras.tree.map_structure(lambda leaf: 0, (args, kwargs)))
        plain = [MISSING if _has_arrays(value) else value for value in args]
        step, self.objects = identify_step(fn, plain, {k: v for k, v in kwargs.items() if not _has_arrays(v)})
        self.key = (
            step,
            structure,
            tuple(map(identify_constant, constants)),
            is_array,
            scalars,
            specs,
        )

    def _count_rows(self, leaves: Sequence[Any], scalars: Sequence[bool], replicas: int) -> list[int]:
        """Return the number of rows of each replica: those of the first array that came out of a distributed
        dataset, or else of the first per-replica array, or of the first array."""
        arrays = [i for i, scalar in enumerate(scalars) if not scalar]
        candidates = [i for i in arrays if is_of_batch(leaves[i])]
        candidates += [i for i in arrays if type(leaves[i]) is PerReplica]
        candidates += [i for i in arrays if not isinstance(leaves[i], PerReplica)]
        if not candidates:
            return [1] * replicas
        return [int(value.shape[0]) for value in self._columns[candidates[0]]]

    def arrays(self, replica: int, shard: int, global_rows: int, active: int) -> list[Any]:
        """Return the arguments of the compiled step for one replica, which is number `shard` of all, of which
        `active` have rows."""
        share = np.empty((self.rows[replica], 3), np.float32)
        share[:] = global_rows, shard, active
        return [share, *(column[replica] for column in self._columns)]

    def example(self) -> list[Any]:
        """Return arrays of one row, with the right shapes and dtypes."""
        like = [_numpy_like(column[0]) for column in self._columns]
        return [np.array([[1, 0, 1]], np.float32), *like]


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, PerReplica | float):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, Variable)


def _has_arrays(value: Any) -> bool:
    leaves = keras.tree.flatten(value)
    return len(leaves) != 1 or leaves[0] is not value or _is_array(value)


def _as_array(value: Any) -> Any:
    if isinstance(value, float):
        return np.asarray(value, keras.config.floatx())
    return np.asarray(value) if isinstance(value, np.generic) else value


def _fill_missing(column: list[Any]) -> list[Any]:
    """Replace the values of replicas without rows by any value of the right kind: nothing is computed for
    them."""
    like = next((value for value in column if value is not None), None)
    if like is None:
        raise TrainingError(
            "A PerReplica argument needs the value of at least one replica. Received: None for each. Leave "
            "out steps without rows."
        )
    return [
        like[:0] if value is None and like.shape else like if value is None else value for value in column
    ]


def _numpy_like(value: Any) -> NDArray[Any]:
    shape = (1, *value.shape[1:])
    if _is_text(value.dtype):
        return np.full(shape, "", object)
    return np.zeros(shape, keras.backend.standardize_dtype(value.dtype))


def _is_text(dtype: Any) -> bool:
    return str(getattr(dtype, "name", dtype)) in ("string", "object") or getattr(dtype, "kind", "") in (
        "S",
        "U",
    )


def _refuse_results(metrics: Sequence[Any]) -> None:
    """Raise TrainingError if a step returns the result of a metric that it updates."""
    if metrics:
        raise TrainingError(
            "In a step a metric has counted the rows of this replica in this step only; those of all "
            "replicas and steps are added up after it. Received: a step that returns what depends on "
            f"{metrics[0].path!r}, which it updates. Return nothing of it, and call the metric's result() "
            "after strategy.run."
        )


class _CompiledStep:
    """One compiled step."""

    def __init__(self, strategy: LoopStrategy, aggregation: LoopAggregation, arguments: _Arguments) -> None:
        self._shards = strategy.membership.context.shards
        self._aggregation = aggregation
        # Others may not get their identities while the step may be asked for.
        self._objects = arguments.objects
        optimizers = strategy.created_in_scope.optimizers
        self.model = StepModel(arguments.call, optimizers, aggregation.replicas, strategy)
        example = arguments.example()
        self.used = UsedObjects()
        with self.used.record_layers():
            _refuse_results(active_backend().trace_step(self.model, example))
        strategy.created_in_scope.check_created_here(self.model.variables)
        for optimizer, variables in self.model.optimizer.groups:
            if not optimizer.built:
                optimizer.build(variables)
        self.used.keep_values(optimizer for optimizer, _ in self.model.optimizer.groups)
        self._result = self.model.result
        self._step = strategy.make_loop_step(self.model, example)

    def run(self, arguments: _Arguments) -> Any:
        own, changes = arguments.rows, self.model.changes_anything
        rows_of_step, active = [sum(own)] * len(own), 1
        if changes:
            rows_of_step, active = self._aggregation.count_step_rows(own)
        parts = []
        for index, (shard, rows) in enumerate(zip(self._shards, arguments.rows, strict=True)):
            data = arguments.arrays(index, shard, rows_of_step[index], active) if rows else None
            parts.append(ShardBatch(shard, rows, data))
        return merge_per_replica([self._result.rebuild(outputs) for outputs in self._step.run(parts)])
