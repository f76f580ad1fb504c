"""A replica on the JAX backend: pure compiled functions, between them plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import NDArray

from insitu.train.backends import Logs
from insitu.train.backends.base import BaseReplica, seed_offset
from insitu.train.backends.record import RecordLayout
from insitu.train.recording import recorded

Arrays = list[Any]
Functional = tuple[Arrays, Arrays, Arrays, Arrays]
"""A model's state as Keras' JAX trainer has it: values of the trainable, the non-trainable, the optimizer's
and the metrics' variables."""


class JaxReplica(BaseReplica):
    """See `Replica`.

    Between steps the state lies in the Keras variables, where callbacks, checkpoints and users find it. A
    batch of another size is compiled anew: the code for a size doesn't depend on who runs it, so bits
    agree across processes.
    """

    def __init__(self, model: Any, data: Any) -> None:
        super().__init__(model, data)
        # Found once: Keras collects them out of all layers each time it is asked.
        self._variables = (
            list(model.trainable_variables),
            list(model.non_trainable_variables),
            list(model.optimizer.variables) if model.optimizer is not None else [],
            list(model.metrics_variables),
        )
        self._seeds = {id(v) for v in self._state.seeds}
        self._sums = {id(v) for v in self._state.sums}
        self._train_packing = _Packing(self._train_record)
        self._test_packing = _Packing(self._test_record)
        self._gradient = self._compile(self._trace_gradient)
        # The old state is given away, as in Keras' own step, so that XLA updates it in place.
        self._apply = self._compile(self._trace_apply, donate_argnums=0)
        self._evaluate = self._compile(self._trace_evaluate)
        self._merge = self._compile(self._trace_merge)
        self._predict = self._compile(self._trace_predict)

    def _compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self._model.run_eagerly or not self._model.jit_compile:
            return function
        compiled: Callable[..., Any] = jax.jit(function, **options)
        return compiled

    def _values(self) -> Functional:
        trainable, others, optimizer, metrics = ([v.value for v in group] for group in self._variables)
        return trainable, others, optimizer, metrics

    # What crosses the border

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        leaves = _leaves(data)
        packed, extra, pieces = self._gradient(self._values(), np.uint32(seed_offset(shard)), leaves)
        for piece, tensor in zip(self._all_pieces, pieces, strict=True):
            np.copyto(floats[piece.start : piece.stop], _view(tensor))
        self._fill(record, self._train_packing, packed, len(leaves[0]))
        start = self._train_record.extra_start
        record[start : start + len(extra)] = [float(value) for value in extra]

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._train_record.combine(records)
        pieces = [floats[p.start : p.stop] for p in self._all_pieces]
        logs, state = self._apply(self._values(), self._train_packing.split(combined), pieces)
        # XLA reads `floats` where they lie: they may be overwritten when this has returned.
        jax.block_until_ready(state)
        for group, values in zip(self._variables, state, strict=True):
            _assign(group, values)
        return self._to_logs(logs, combined)

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        del shard  # nothing random happens in a test step
        leaves = _leaves(data)
        packed = self._evaluate(self._values(), leaves)
        self._fill(record, self._test_packing, packed, len(leaves[0]))

    def merge(self, records: NDArray[np.float64]) -> Logs:
        combined = self._test_record.combine(records)
        logs, metrics = self._merge(self._values()[3], self._test_packing.split(combined))
        _assign(self._variables[3], metrics)
        return self._to_logs(logs, None)

    def predict(self, data: Any) -> Any:
        return keras.tree.map_structure(np.array, self._predict(self._values(), _leaves(data)))

    @staticmethod
    def _fill(record: NDArray[np.float64], packing: _Packing, packed: Mapping[str, Any], rows: int) -> None:
        record[:] = 0
        record[0] = rows
        for dtype, vector in packed.items():
            record[packing.places[dtype]] = _view(vector)

    # What is traced

    def _trace_gradient(self, state: Functional, offset: Any, leaves: Arrays) -> Any:
        trainable, others, optimizer, metrics = state
        others = self._shift_seeds(others, offset)
        with recorded(self._model.optimizer) as recording:
            logs, (_, _, others, metrics) = _step_result(
                self._model.train_step((trainable, others, optimizer, self._zero_sums(metrics)), self._pack(leaves)),
                recording,
            )
        return logs, others, metrics
