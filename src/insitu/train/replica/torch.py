"""A replica on the PyTorch backend: eager, with tensors and the exchange's arrays in the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.exchange import ALIGNMENT
from insitu.train.replica.base import BaseReplica, seed_offset
from insitu.train.replica.gradient_capture import capture_gradients
from insitu.train.replica.leaves import flatten_batch
from insitu.train.replica.protocol import Logs
from insitu.train.replica.record import RecordLayout
from insitu.train.replica.state import find_seed_generators


class TorchReplica(BaseReplica):
    """See `Replica`.

    Only what Keras knows as a variable is combined over shards and saved. A module whose buffers change
    while it trains, such as `torch.nn.BatchNorm2d`, is refused.
    """

    def __init__(self, model: Any, data: Any) -> None:
        super().__init__(model, data)
        if model.jit_compile:
            warnings.warn(
                "On the PyTorch backend a strategy runs steps eagerly: jit_compile=True has no effect.",
                stacklevel=2,
            )
        _draw_from_own_seeds(model)
        state = self._state
        self._seeds = _tensors(state.seeds)
        self._sums = _tensors(state.sums)
        self._moved_in_training = _tensors(
            (*state.mean, *state.seeds, *state.first, *state.sums, *state.metric_first)
        )
        self._moved_in_tests = _tensors((*state.sums, *state.metric_first))
        spans = (*self._gradient_spans, *self._mean_spans)
        self._sizes = [span.stop - span.start for span in spans]
        self._shapes = [span.shape for span in spans]
        self._buffers_checked = False

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        leaves = as_tensors(data)
        offset = _as_int32(seed_offset(shard))
        with torch.no_grad(), _restored(self._moved_in_training):
            self._shift_seeds(offset)
            self._zero_sums()
            with (
                torch.enable_grad(),
                self._watched_buffers(),
                capture_gradients(self._model.optimizer) as captured,
            ):
                logs = self._model.train_step(self._pack(leaves))
            self._shift_seeds(-offset)
            self._read_record(self._train_record, len(leaves[0]), record)
            extra = [float(value) for value in self._select_extra_logs(logs)]
            record[self._train_record.extra_start :][: len(extra)] = extra
            gradients = self._order_gradients(captured.variables, captured.gradients)
            self._write_floats(floats, gradients)

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._train_record.combine(records)
        values = self._views(floats)
        count = len(self._gradient_spans)
        state = self._state
        with torch.no_grad():
            for variable, value in zip(state.mean, values[count:], strict=True):
                variable.value.copy_(value)
            self._write_record(self._train_record, combined)
            gradients = [
                None if index in self._without_gradient else gradient.to(variable.value)
                for index, (gradient, variable) in enumerate(
                    zip(values[:count], state.trainable, strict=True)
                )
            ]
            if gradients:
                self._model.optimizer.apply(gradients, list(state.trainable))
            return self._to_logs(self._model.get_metrics_result(), combined)

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._train_record.combine(records)
        state = self._state
        with torch.no_grad():
            targets = _tensors((*state.trainable, *state.mean))
            if targets:
                torch._foreach_copy_(targets, self._views(floats))
            self._write_record(self._train_record, combined)
            return self._to_logs(self._model.get_metrics_result(), combined)

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        del shard  # nothing random happens in a test step
        leaves = as_tensors(data)
        with torch.no_grad(), _restored(self._moved_in_tests):
            self._zero_sums()
            self._model.test_step(self._pack(leaves))
            self._read_record(self._test_record, len(leaves[0]), record)

    def merge(self, records: NDArray[np.float64]) -> Logs:
        with torch.no_grad():
            self._write_record(self._test_record, self._test_record.combine(records))
            return self._to_logs(self._model.get_metrics_result(), None)

    def predict(self, data: Any) -> Any:
        if self._model.training:
            self._model.eval()
        with torch.no_grad():
            outputs = self._model.predict_step(self._pack(as_tensors(data)))
        return keras.tree.map_structure(lambda tensor: np.array(tensor.detach().cpu().numpy()), outputs)

    # Helpers

    def _shift_seeds(self, offset: int) -> None:
        for tensor in self._seeds:
            tensor[0] += offset  # int32 wraps round, as seeds of 32 bits shall

    def _zero_sums(self) -> None:
        if self._sums:
            torch._foreach_zero_(self._sums)

    def _views(self, floats: NDArray[Any]) -> list[Any]:
        """Return a tensor for each span, in the memory of `floats`."""
        flat = torch.from_numpy(floats).split_with_sizes(self._sizes) if self._sizes else ()
        return [part.view(shape) for part, shape in zip(flat, self._shapes, strict=True)]

    def _write_floats(self, floats: NDArray[Any], gradients: Sequence[Any]) -> None:
        targets = self._views(floats)
        values = [*gradients, *_tensors(self._state.mean)]
        present = [index for index, value in enumerate(values) if value is not None]
        for index in set(range(len(values))).difference(present):
            targets[index].zero_()
        if present:
            torch._foreach_copy_([targets[i] for i in present], [values[i] for i in present])

    def _read_record(self, layout: RecordLayout, rows: int, record: NDArray[np.float64]) -> None:
        record[:] = 0
        record[0] = rows
        for variable, span in (*layout.sums, *layout.firsts):
            record[span.start : span.stop] = variable.value.detach().cpu().numpy().reshape(-1)

    @staticmethod
    def _write_record(layout: RecordLayout, combined: NDArray[np.float64]) -> None:
        values = torch.from_numpy(combined)
        for variable, span in layout.firsts:
            variable.value.copy_(values[span.start : span.stop].view(span.shape))
        for variable, span in layout.sums:
            variable.value.add_(values[span.start : span.stop].view(span.shape).to(variable.value))

    @contextmanager
    def _watched_buffers(self) -> Iterator[None]:
        """Raise TrainingError where the first step has changed state that Keras doesn't know."""
        if self._buffers_checked:
            yield
            return
        before = [(name, buffer, buffer.clone()) for name, buffer in _buffers(self._model)]
        yield
        moved = [name for name, buffer, value in before if not torch.equal(buffer, value)]
        if moved:
            raise TrainingError(
                "State that changes in training must be in Keras variables, so that it can be combined over "
                f"shards and saved. Received: PyTorch buffers that changed: {', '.join(moved[:5])}. Use the "
                "Keras layer (keras.layers.BatchNormalization for torch.nn.BatchNorm)."
            )
        self._buffers_checked = True


@contextmanager
def _restored(tensors: Sequence[Any]) -> Iterator[None]:
    """Restore the values of `tensors` after the block, whatever happens in it."""
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        if saved:
            torch._foreach_copy_(list(tensors), saved)


def _draw_from_own_seeds(model: Any) -> None:
    """Make layers without a seed draw from their own generator, as on the other backends.

    Keras' dropout for PyTorch would draw from the process' one stream instead, which no shard has to itself
    and no replacement can take over.
    """
    for generator in find_seed_generators(model):
        if generator._initial_seed is None:
            generator._initial_seed = int(generator.state.numpy()[0])


def _buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers of PyTorch modules anywhere in the model; Keras' layers don't list those of
    others."""
    for layer in model._flatten_layers():
        for name, buffer in layer.named_buffers():
            yield f"{layer.name}/{name}", buffer


def _tensors(variables: Sequence[Any]) -> list[Any]:
    return [variable.value.detach() for variable in variables]


def as_tensors(data: Any) -> list[Any]:
    return [_to_tensor(np.asarray(leaf)) for leaf in flatten_batch(data)]


def _to_tensor(array: NDArray[Any]) -> Any:
    """Return a tensor in the array's own memory, where it is aligned as PyTorch's own: some kernels round
    differently elsewhere."""
    if array.ctypes.data % ALIGNMENT or not array.flags.c_contiguous or not array.flags.writeable:
        return keras.ops.convert_to_tensor(array.copy()).clone()
    return keras.ops.convert_to_tensor(array)


def _as_int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
