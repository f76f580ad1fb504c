"""A replica without peers, on the JAX backend: each step is one compiled function of the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from insitu.train.replica.jax import compile_for, copy_aliased, refuse_distribution, unpack_step
from insitu.train.replica.leaves import flatten_to_numpy, pack_batch
from insitu.train.replica.protocol import Logs


class FusedJax:
    """See `FusedReplica`. Between steps the state is in the Keras variables, as everywhere in insitu."""

    def __init__(self, model: Any, data: Any) -> None:
        refuse_distribution()
        self._model = model
        self._structure = data
        # Collected once: Keras searches all layers each time.
        trainable, others = list(model.trainable_variables), list(model.non_trainable_variables)
        optimizer = list(model.optimizer.variables) if model.optimizer is not None else []
        metrics = list(model.metrics_variables)
        self._trained = (trainable, others, optimizer, metrics)
        self._tested = (trainable, others, metrics)
        self._predicting = (trainable, others)
        # The old state is donated, as in Keras' own step, so that XLA updates it in place.
        self._train = compile_for(model, self._trace_train, donate_argnums=0)
        self._test = compile_for(model, self._trace_test, donate_argnums=0)
        self._predict = compile_for(model, self._trace_predict)

    def train(self, data: Any) -> Logs:
        logs, state = self._train(copy_aliased(_values(self._trained)), flatten_to_numpy(data))
        _assign(self._trained, state)
        return dict(logs)

    def test(self, data: Any) -> Logs:
        # Weights stay where they are; the rest of the state may move.
        weights = _values(self._tested[:1])
        moved = copy_aliased(_values(self._tested[1:]), *weights)
        logs, state = self._test(moved, weights, flatten_to_numpy(data))
        _assign(self._tested[1:], state)
        return dict(logs)

    def predict(self, data: Any) -> Any:
        outputs, others = self._predict(_values(self._predicting), flatten_to_numpy(data))
        _assign(self._predicting[1:], [others])
        return keras.tree.map_structure(np.array, outputs)

    # Traced functions

    def _pack(self, leaves: Sequence[Any]) -> Any:
        return pack_batch(self._structure, leaves)

    def _trace_train(self, state: Any, leaves: Any) -> Any:
        return unpack_step(self._model.train_step(state, self._pack(leaves)), 4)

    def _trace_test(self, moved: Any, weights: Any, leaves: Any) -> Any:
        logs, state = unpack_step(self._model.test_step((*weights, *moved), self._pack(leaves)), 3)
        return logs, state[1:]

    def _trace_predict(self, state: Any, leaves: Any) -> Any:
        return self._model.predict_step(state, self._pack(leaves))


def _values(groups: Any) -> Any:
    return tuple([v._value for v in group] for group in groups)


def _assign(groups: Any, state: Any) -> None:
    for group, values in zip(groups, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable._value = value
