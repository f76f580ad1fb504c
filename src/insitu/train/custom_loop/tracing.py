"""Run a user's step without effect, and record what it touches: variables, seeds, optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer

from insitu.base.errors import TrainingError
from insitu.train.replica import tell_repeated_rows

_SCOPE = "stateless_scope"
"""Keras' attribute for the open stateless scope."""


class DeferredUpdates:
    """The updates that a step asked its optimizers for: `calls[i]` is (optimizer, gradients, variables)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[Any], list[Any]]] = []

    @property
    def variables(self) -> list[Any]:
        return [variable for _, _, variables in self.calls for variable in variables]

    @property
    def gradients(self) -> list[Any]:
        return [gradient for _, gradients, _ in self.calls for gradient in gradients]

    def note(self, optimizer: Any, gradients: Any, variables: Any) -> None:
        """Record a call of `optimizer.apply`. Raises TrainingError for one that can't be deferred."""
        variables = list(optimizer._trainable_variables if variables is None else variables)
        if any(optimizer is known for known, _, _ in self.calls):
            raise TrainingError(
                "A step that strategy.run runs may call each optimizer's apply() once. Received: a second "
                f"call of {optimizer.name!r}. Make two steps of it, and run them one after the other."
            )
        foreign = [v for v in variables if not isinstance(v, Variable)]
        if foreign:
            raise TrainingError(
                "Optimizers update Keras variables (model.trainable_variables). Received: "
                f"{type(foreign[0]).__name__}."
            )
        taken = {id(v) for v in self.variables}
        if any(id(v) in taken for v in variables):
            raise TrainingError(
                "In one step a variable has one optimizer. Received: two that update "
                f"{next(v.path for v in variables if id(v) in taken)!r}."
            )
        gradients = list(gradients)
        tell_repeated_rows(optimizer, gradients, variables)
        self.calls.append((optimizer, gradients, variables))


@contextlib.contextmanager
def defer_apply(optimizers: Sequence[Any], deferred: DeferredUpdates) -> Iterator[None]:
    """While open, record the updates of `optimizers` in `deferred` instead of applying them. `apply` of
    another optimizer raises TrainingError."""
    original = BaseOptimizer.apply

    def refuse(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        del grads, trainable_variables
        raise TrainingError(
            "An optimizer that is used in strategy.run must be made in strategy.scope(), so that its "
            f"gradients are summed over replicas. Received: {optimizer.name!r}, which was made outside."
        )

    def noting(optimizer: Any) -> Callable[..., None]:
        return lambda grads, trainable_variables=None: deferred.note(optimizer, grads, trainable_variables)

    BaseOptimizer.apply = refuse
    for optimizer in optimizers:
        # Around Keras' attribute tracking: this is no part of the optimizer's state.
        object.__setattr__(optimizer, "apply", noting(optimizer))
    try:
        yield
    finally:
        BaseOptimizer.apply = original
        for optimizer in optimizers:
            object.__delattr__(optimizer, "apply")


class VariableTracer(keras.StatelessScope):
    """A stateless scope that records reads and writes of variables. Nothing is assigned while it is open.

    `read` and `written` hold each variable once, in the order of its first use.
    """

    def __init__(
        self, deferred: DeferredUpdates, leave_trace: Callable[[], Any] = contextlib.nullcontext
    ) -> None:
        """`leave_trace` returns a scope in which the backend computes at once, also during a trace."""
        super().__init__(initialize_variables=False)
        self._leave_trace = leave_trace
        self._applied = deferred
        self._read: dict[int, Any] = {}
        self._written: dict[int, Any] = {}
        self._seeds: dict[int, Any] = {}

    @property
    def read(self) -> list[Any]:
        return list(self._read.values())

    @property
    def written(self) -> list[Any]:
        return list(self._written.values())

    @property
    def seed_generators(self) -> list[Any]:
        return list(self._seeds.values())

    def get_current_value(self, variable: Any) -> Any:
        self._check_not_updated(variable)
        self._read.setdefault(id(variable), variable)
        value = super().get_current_value(variable)
        # Not None: Keras' regularizers ask the scope itself.
        return variable._value if value is None else value

    def add_update(self, update: Any) -> None:
        variable, _ = update
        self._written.setdefault(id(variable), variable)
        super().add_update(update)

    def _check_not_updated(self, variable: Any) -> None:
        for optimizer, _, variables in self._applied.calls:
            if any(variable is v for v in (*variables, *optimizer.variables)):
                raise TrainingError(
                    "Variables are updated after the step, once gradients are summed over replicas: a step "
                    f"can't read them after optimizer.apply(). Received: a read of {variable.path!r}. "
                    "Put what comes after apply() into a step of its own."
                )

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Open the scope, also record seed generators, and refuse new variables but those of metrics, some of
        which make them when they are updated first."""
        draw, make = keras.random.SeedGenerator.next, Variable.__init__
        add = keras.metrics.Metric.add_variable
        seeds = self._seeds

        def next_seed(generator: Any, ordered: bool = True) -> Any:
            seeds.setdefault(id(generator), generator)
            return draw(generator, ordered=ordered)

        def add_outside(metric: Any, *args: Any, **kwargs: Any) -> Any:
            # With a value, as in the scope: the trace continues to use it.
            Variable.__init__ = make
            global_state.set_global_attribute(_SCOPE, None)
            try:
                with self._leave_trace():
                    return add(metric, *args, **kwargs)
            finally:
                global_state.set_global_attribute(_SCOPE, self)
                Variable.__init__ = _refuse_to_make

        keras.random.SeedGenerator.next = next_seed
        keras.metrics.Metric.add_variable = add_outside
        Variable.__init__ = _refuse_to_make
        try:
            with self:
                yield
        finally:
            keras.random.SeedGenerator.next = draw
            keras.metrics.Metric.add_variable = add
            Variable.__init__ = make


def _refuse_to_make(variable: Any, *args: Any, **kwargs: Any) -> None:
    del variable, args
    raise TrainingError(
        "strategy.run can't make variables, since each replica would have its own. Received: a step that "
        f"makes {kwargs.get('name') or 'one'!r}. Make them in strategy.scope() before: build a model by "
        "model.build(input_shape), or call it once."
    )
