"""Steps of a probe on the JAX backend: compiled for the few sizes of batches that a probe has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.backends.jax.replica import compile_for, unpack_step
from insitu.train.replica import BatchTotals, capture_gradients, count_losses, count_rows, watch_step
from insitu.train.replica.probe import Outcome, Totals, losses_of, read_logs, to_float64


class JaxSteps:
    """See `Steps`."""

    def __init__(self, model: Any, trainable: Any) -> None:
        self._model = model
        self._trainable = trainable
        self._groups = (
            list(model.trainable_variables),
            list(model.non_trainable_variables),
            list(model.optimizer.variables) if model.optimizer is not None else [],
            list(model.metrics_variables),
        )
        # Each program runs a few times only. CPUs have this option.
        quickly = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        options = {"compiler_options": quickly}
        self.demands_totals = True
        self._train = compile_for(model, self._trace_train, **options)
        self._test = compile_for(model, self._trace_test, **options)
        self._count = compile_for(model, self._trace_count, static_argnums=2, **options)
        self._forward = compile_for(model, self._trace_forward, static_argnums=2, **options)
        self._averaged: frozenset[int] = frozenset()
        self._seen = False

    def train(self, data: Any, *, totals: Totals = None, factor: float = 1.0, shift: float = 0.0) -> Outcome:
        del shift  # nothing can be read past Keras: the state goes in and out
        arguments = (self._values(), data, jnp.float32(factor), totals)
        gradients, logs, others, metrics = self._train(*arguments)
        self._assign(others, metrics)
        arrays = {name: to_float64(value) for name, value in logs.items()}
        return Outcome([to_float64(g) for g in gradients], arrays, self._averaged, self._seen)

    def test(self, data: Any, *, totals: Totals = None) -> Outcome:
        logs, others, metrics = self._test(self._values(), data, totals)
        self._assign(others, metrics)
        return Outcome([], {name: to_float64(value) for name, value in logs.items()}, self._averaged)

    def count(self, data: Any, *, training: bool) -> Totals:
        counts = self._count(self._values(), data, training)
        totals = np.array([count_rows(data), *map(float, counts.totals)], np.float32)
        return BatchTotals(totals, counts.rows)

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        return [to_float64(leaf) for leaf in self._forward(self._values(), data, training)]

    def close(self, *, chance_used: bool) -> None:
        if chance_used:
            # Compiled functions of the user would continue without random numbers.
            jax.clear_caches()

    def _values(self) -> Any:
        return tuple([v.value for v in group] for group in self._groups)

    def _assign(self, others: Any, metrics: Any) -> None:
        for variables, values in ((self._groups[1], others), (self._groups[3], metrics)):
            for variable, value in zip(variables, values, strict=True):
                variable._direct_assign(value)

    def _trace_train(self, state: Any, data: Any, factor: Any, totals: Any) -> Any:
        with (
            watch_step(self._model) as watch,
            losses_of(self._model, self, totals, data),
            capture_gradients(self._model.optimizer) as captured,
            self._scaled_gradients(factor) as seen,
        ):
            logs, end = unpack_step(self._model.train_step(state, data), 4)
        self._averaged, self._seen = frozenset(watch.means.variables), bool(seen)
        by_variable = {id(v): g for v, g in zip(captured.variables, captured.gradients, strict=True)}
        zeros = {id(v): jnp.zeros(tuple(v.shape)) for v in self._trainable}
        gradients = [zeros[id(v)] if (g := by_variable.get(id(v))) is None else g for v in self._trainable]
        return gradients, read_logs(logs, watch), end[1], end[3]

    def _trace_test(self, state: Any, data: Any, totals: Any) -> Any:
        trainable, others, _, metrics = state
        with watch_step(self._model) as watch, losses_of(self._model, self, totals, data):
            logs, end = unpack_step(self._model.test_step((trainable, others, metrics), data), 3)
        self._averaged = frozenset(watch.means.variables)
        return read_logs(logs, watch), end[1], end[2]

    def _trace_count(self, state: Any, data: Any, training: bool) -> Any:
        trainable, others, _, metrics = state
        with count_losses(self._model) as counts:
            if training:
                with capture_gradients(self._model.optimizer, trains=bool(self._trainable)):
                    self._model.train_step(state, data)
            else:
                self._model.test_step((trainable, others, metrics), data)
        return counts

    def _trace_forward(self, state: Any, data: Any, training: bool) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        options = {"training": training} if self._model._call_has_training_arg else {}
        outputs, _ = self._model.stateless_call(state[0], state[1], x, **options)
        return keras.tree.flatten(outputs)

    @contextlib.contextmanager
    def _scaled_gradients(self, factor: Any) -> Iterator[list[bool]]:
        """While open, scale gradients for all trainable variables. The list isn't empty once there were."""
        seen: list[bool] = []
        originals = (jax.grad, jax.value_and_grad)
        shapes = [tuple(v.shape) for v in self._groups[0]]

        def scale(gradients: Any) -> Any:
            leaves = jax.tree.leaves(gradients)
            if [tuple(np.shape(leaf)) for leaf in leaves] != shapes:
                return gradients
            seen.append(True)
            return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

        def grad(*arguments: Any, **options: Any) -> Any:
            function, auxiliary = originals[0](*arguments, **options), bool(options.get("has_aux"))

            def call(*values: Any, **more: Any) -> Any:
                result = function(*values, **more)
                return (scale(result[0]), result[1]) if auxiliary else scale(result)

            return call

        def value_and_grad(*arguments: Any, **options: Any) -> Any:
            function = originals[1](*arguments, **options)

            def call(*values: Any, **more: Any) -> Any:
                value, gradients = function(*values, **more)
                return value, scale(gradients)

            return call

        jax.grad, jax.value_and_grad = grad, value_and_grad
        try:
            yield seen
        finally:
            jax.grad, jax.value_and_grad = originals
