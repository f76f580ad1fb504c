"""The part of a replica that all backends share: the layout of its numbers, and the logs of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.train.replica.flat import Span, compute_spans, group_into_buckets
from insitu.train.replica.leaves import pack_batch
from insitu.train.replica.protocol import Logs
from insitu.train.replica.record import EXTRA_LOGS, RecordLayout
from insitu.train.replica.state import SEED_STRIDE, read_state


class BaseReplica:
    """The neutral part of a `Replica`: nothing here computes with a backend's tensors.

    `floats` hold a gradient for each trainable variable, then the state that is averaged. The spans and
    buckets of both are relative to the whole buffer.
    """

    def __init__(self, model: Any, data: Any) -> None:
        self._model = model
        self._state = read_state(model)
        self._structure = data
        self._train_record = RecordLayout(self._state, training=True)
        self._test_record = RecordLayout(self._state, training=False)
        self.train_record_size = self._train_record.size
        self.test_record_size = self._test_record.size
        self._lay_out_floats()
        self.copy_out: Callable[[NDArray[Any], NDArray[Any]], object] = np.copyto
        """`copy_out(to, source)` copies a part of the gradient out of the backend's memory."""
        self._without_gradient: frozenset[int] = frozenset()
        self._extra_logs: tuple[str, ...] = ()

    def _lay_out_floats(self) -> None:
        trainable, mean = self._state.trainable, self._state.mean
        self._gradient_spans = compute_spans([tuple(v.shape) for v in trainable])
        gradients_stop = self._gradient_spans[-1].stop if trainable else 0
        self._mean_spans = compute_spans([tuple(v.shape) for v in mean], gradients_stop)
        self.floats_size = self._mean_spans[-1].stop if mean else gradients_stop
        self._gradient_buckets = group_into_buckets(self._gradient_spans)
        self._mean_buckets = group_into_buckets(self._mean_spans)
        self._all_buckets = (*self._gradient_buckets, *self._mean_buckets)
        wide = any(keras.backend.standardize_dtype(v.dtype) == "float64" for v in (*trainable, *mean))
        self.floats_dtype: np.dtype[Any] = np.dtype("float64" if wide else "float32")

    def assign(self, floats: NDArray[Any]) -> None:
        """See `Replica`."""
        for variable, span in self.float_spans():
            variable.assign(floats[span.start : span.stop].reshape(span.shape).astype(variable.numpy().dtype))

    def float_spans(self) -> list[tuple[Any, Span]]:
        """See `Replica`."""
        state = self._state
        return list(
            zip((*state.trainable, *state.mean), (*self._gradient_spans, *self._mean_spans), strict=True)
        )

    def _pack(self, leaves: Sequence[Any]) -> Any:
        return pack_batch(self._structure, leaves)

    def _select_extra_logs(self, logs: Any) -> list[Any]:
        """Return the logs of a train_step that are no metrics of the model. Raises TrainingError for too
        many, or for one that is no scalar."""
        known = set(self._model.get_metrics_result())
        extra = {name: value for name, value in (logs or {}).items() if name not in known}
        if len(extra) > EXTRA_LOGS or any(getattr(v, "shape", ()) != () for v in extra.values()):
            received = [f"{name} of shape {getattr(value, 'shape', ())}" for name, value in extra.items()]
            raise TrainingError(
                f"A train_step may return up to {EXTRA_LOGS} scalars beside the model's metrics. "
                f"Received: {', '.join(received)}"
            )
        self._extra_logs = tuple(extra)
        return list(extra.values())

    def _order_gradients(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients in the order of the state's trainable variables, with None where there is
        none."""
        by_variable = {id(v): g for v, g in zip(variables, gradients, strict=True)}
        ordered = [by_variable.get(id(variable)) for variable in self._state.trainable]
        self._without_gradient = frozenset(i for i, gradient in enumerate(ordered) if gradient is None)
        return ordered

    def _to_logs(self, logs: Mapping[str, Any], combined: NDArray[np.float64] | None) -> Logs:
        """Return the model's metrics and, from the `combined` record of a training step, its extra logs."""
        values = {name: float(value) for name, value in logs.items()}
        if combined is not None:
            start = self._train_record.extra_start
            values.update(zip(self._extra_logs, combined[start:].tolist(), strict=False))
        return values


def seed_offset(shard: int) -> int:
    """Return the number that is added to the seeds of `shard`, in [0, 2**32): backends keep seeds in 32
    bits."""
    return shard * SEED_STRIDE % (1 << 32)
