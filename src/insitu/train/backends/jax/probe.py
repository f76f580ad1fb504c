"""Steps of a probe on the JAX backend: compiled for the few sizes of batches that a probe has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.backends.jax.replica import assign_groups, compile_for, unpack_step, values_of, variables_of
from insitu.train.replica import capture_gradients, count_losses, watch_step
from insitu.train.replica.probe import (
    Outcome,
    Totals,
    add_rows,
    losses_of,
    make_outcome,
    read_logs,
    split_inputs,
    to_float64,
)


class JaxSteps:
    """See `Steps`."""

    def __init__(self, model: Any, trainable: Any) -> None:
        self._model = model
        self._trainable = trainable
        self._groups = variables_of(model)
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
        assign_groups(self._groups[1::2], (others, metrics))
        return make_outcome(gradients, logs, self._averaged, self._seen)

    def test(self, data: Any, *, totals: Totals = None) -> Outcome:
        logs, others, metrics = self._test(self._values(), data, totals)
        assign_groups(self._groups[1::2], (others, metrics))
        return make_outcome([], logs, self._averaged)

    def count(self, data: Any, *, training: bool) -> Totals:
        return add_rows(data, self._count(self._values(), data, training))

    def forward(self, data: Any, *, training: bool) -> list[NDArray[Any]]:
        return [to_float64(leaf) for leaf in self._forward(self._values(), data, training)]

    def close(self, *, chance_used: bool) -> None:
        if chance_used:
            # Compiled functions of the user would continue without random numbers.
            jax.clear_caches()

    def _values(self) -> Any:
        return values_of(self._groups)

    def _trace_train(self, state: Any, data: Any, factor: Any, totals: Any) -> Any:
        with (
            watch_step(self._model) as watch,
            losses_of(self._model, self, totals, data),
            capture_gradients(self._model.optimizer) as captured,
            self._scaled_gradients(factor) as seen,
        ):
            logs, end = unpack_step(self._model.train_step(state, data), 4)
        self._averaged, self._seen = frozenset(watch.means.variables), bool(seen)
        gradients = [
            jnp.zeros(tuple(v.shape)) if g is None else g
            for v, g in zip(self._trainable, captured.sort_for(self._trainable), strict=True)
        ]
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
        x, options = split_inputs(self._model, data, training)
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


def random_functions(
    of_keras: Mapping[str, Any],
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """See `Backend`."""
    ops = keras.ops

    def uniform(key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0) -> Any:
        return of_keras["uniform"](shape, minval, maxval, _floating(dtype))

    yield jax.random, "normal", lambda key, shape=(), dtype=float: ops.zeros(shape, _floating(dtype))
    yield jax.random, "uniform", uniform
    yield jax.random, "bernoulli", lambda key, p=0.5, shape=(): ops.broadcast_to(p >= 0.5, shape)
    yield jax.random, "permutation", lambda key, x, **options: ops.arange(x) if np.ndim(x) == 0 else x


def _floating(dtype: Any) -> Any:
    return keras.config.floatx() if dtype is float else dtype
