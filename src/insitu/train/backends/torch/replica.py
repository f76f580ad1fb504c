"""A replica on the PyTorch backend: eager, with tensors and the exchange's arrays in the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.exchange import ALIGNMENT
from insitu.train.replica import (
    BaseReplica,
    CapturedGradients,
    CombinationPlan,
    Logs,
    LossCounts,
    Operation,
    RecordLayout,
    capture_gradients,
    count_losses,
    find_seed_generators,
    flatten_batch,
    pack_batch,
    refuse_assigned,
    refuse_use_of_updated,
    seed_offset,
    watch_step,
)


class TorchReplica(BaseReplica):
    """See `Replica`.

    Only what Keras knows as a variable is combined over shards and saved. A module whose buffers change
    while it trains, such as `torch.nn.BatchNorm2d`, is refused.
    """

    def __init__(self, model: Any, data: Any, plan: CombinationPlan | None = None) -> None:
        super().__init__(model, data, plan)
        if model.jit_compile:
            warnings.warn(
                "On the PyTorch backend a strategy runs steps eagerly: jit_compile=True has no effect.",
                stacklevel=2,
            )
        _draw_from_own_seeds(model)
        state = self._state
        self._seeds = _tensors(state.seeds)
        self._sums = _tensors(state.sums)
        self._moved_in_training = _tensors(state.moved)
        self._moved_in_tests = _tensors(state.moved_in_tests)
        spans = (*self._gradient_spans, *self._mean_spans)
        self._sizes = [span.stop - span.start for span in spans]
        self._shapes = [span.shape for span in spans]
        self._step_checked = False

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        self._plan.check_train()
        leaves = as_tensors(data)
        offset = _as_int32(seed_offset(shard))
        with torch.no_grad(), _restored(self._moved_in_training):
            self._shift_seeds(offset)
            self._zero_sums()
            before = self._read_changing(self._train_record)
            with (
                self._noting_needs(training=True),
                torch.enable_grad(),
                watch_step(self._model) as watch,
                self._dividing(self.losses[0].batch_of(shard), len(leaves[0]), training=True),
                self._captured_gradients() as captured,
                self._checked_step(captured),
            ):
                logs = self._model.train_step(self._pack(leaves))
            self._shift_seeds(-offset)
            extra = self._record_logs(logs, watch, training=True)
            self._read_record(self._train_record, len(leaves[0]), before, extra, record)
            gradients = self._order_gradients(captured)
            self._write_floats(floats, gradients)

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=True)
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
            return self._to_logs(self._metric_logs(training=True), combined, training=True)

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=True)
        state = self._state
        with torch.no_grad():
            targets = _tensors((*state.trainable, *state.mean))
            if targets:
                torch._foreach_copy_(targets, self._views(floats))
            self._write_record(self._train_record, combined)
            return self._to_logs(self._metric_logs(training=True), combined, training=True)

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        self._plan.check_test()
        leaves = as_tensors(data)
        offset = _as_int32(seed_offset(shard))
        with torch.no_grad(), _restored(self._moved_in_tests):
            self._shift_seeds(offset)
            self._zero_sums()
            before = self._read_changing(self._test_record)
            with (
                self._noting_needs(training=False),
                watch_step(self._model) as watch,
                self._dividing(self.losses[1].batch_of(shard), len(leaves[0]), training=False),
            ):
                logs = self._model.test_step(self._pack(leaves))
            self._shift_seeds(-offset)
            extra = self._record_logs(logs, watch, training=False)
            self._read_record(self._test_record, len(leaves[0]), before, extra, record)

    def merge(self, records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=False)
        with torch.no_grad():
            self._write_record(self._test_record, combined)
            return self._to_logs(self._metric_logs(training=False), combined, training=False)

    def predict(self, data: Any) -> Any:
        if self._model.training:
            self._model.eval()
        with torch.no_grad():
            outputs = self._model.predict_step(self._pack(as_tensors(data)))
        return keras.tree.map_structure(lambda tensor: np.array(tensor.detach().cpu().numpy()), outputs)

    # Helpers

    def _count(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        leaves, state = as_tensors(data), self._state
        offset = _as_int32(seed_offset(shard))
        with (
            torch.no_grad(),
            _restored(self._moved_in_training if training else self._moved_in_tests),
            count_losses(self._model) as counts,
        ):
            self._shift_seeds(offset)
            if training:
                with (
                    torch.enable_grad(),
                    capture_gradients(self._model.optimizer, trains=bool(state.trainable)),
                ):
                    self._model.train_step(self._pack(leaves))
            else:
                self._model.test_step(self._pack(leaves))
            totals = np.array([float(count) for count in counts.totals])
            return LossCounts(totals, [np.array(each.detach().cpu().numpy()) for each in counts.rows])

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

    def _learn_logs(self, *, training: bool) -> None:
        record = np.zeros(self._layouts[training].size)
        if training:
            self.gradient(0, self._structure, np.zeros(self.floats_size, self.floats_dtype), record)
        else:
            self.evaluate(0, self._structure, record)

    @staticmethod
    def _read_changing(layout: RecordLayout) -> dict[int, Any]:
        """Return the values of variables whose changes are summed, by id."""
        changing = [v for v, _, operation in layout.others if operation is Operation.SUM_OF_CHANGES]
        return {id(v): v.value.detach().clone() for v in changing}

    def _read_record(
        self,
        layout: RecordLayout,
        rows: int,
        before: Mapping[int, Any],
        extra: Sequence[Any],
        record: NDArray[np.float64],
    ) -> None:
        record[:] = 0
        record[0] = rows
        for variable, span in layout.entries():
            value = variable.value.detach()
            if id(variable) in before:
                value = value - before[id(variable)]
            record[span.start : span.stop] = value.cpu().numpy().reshape(-1)
        record[layout.extra_start :][: len(extra)] = [float(value) for value in extra]

    @staticmethod
    def _write_record(layout: RecordLayout, combined: NDArray[np.float64]) -> None:
        values = torch.from_numpy(combined)
        changing = [
            (v, span) for v, span, operation in layout.others if operation is Operation.SUM_OF_CHANGES
        ]
        added = {id(v) for v, _ in (*layout.sums, *changing)}
        for variable, span in layout.entries():
            value = values[span.start : span.stop].view(span.shape)
            if id(variable) in added:
                variable.value.add_(value.to(variable.value))
            else:
                variable.value.copy_(value)

    @contextmanager
    def _checked_step(self, captured: CapturedGradients) -> Iterator[None]:
        """Raise TrainingError if the first step does what can't be combined: uses weights after their
        update, assigns them, or changes state that Keras doesn't know."""
        if self._step_checked:
            yield
            return
        before = [(name, buffer, buffer.clone()) for name, buffer in _buffers(self._model)]
        weights = [(v, v.value.detach(), v.value.detach().clone()) for v in self._state.trainable]
        with refuse_use_of_updated(self._model, captured.is_applied):
            yield
        moved = [name for name, buffer, value in before if not torch.equal(buffer, value)]
        if moved:
            raise TrainingError(
                "State that changes in training must be in Keras variables, so that it can be combined over "
                f"shards and saved. Received: PyTorch buffers that changed: {', '.join(moved[:5])}. Use the "
                "Keras layer (keras.layers.BatchNormalization for torch.nn.BatchNorm)."
            )
        refuse_assigned(self._model, [v for v, value, old in weights if not torch.equal(value, old)])
        self._step_checked = True


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
    """Return a tensor in the array's own memory, if it is aligned as PyTorch's own: some kernels round
    differently elsewhere."""
    if array.ctypes.data % ALIGNMENT or not array.flags.c_contiguous or not array.flags.writeable:
        return keras.ops.convert_to_tensor(array.copy()).clone()
    return keras.ops.convert_to_tensor(array)


def _as_int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


# A replica without peers: each step is one call


class FusedTorch:
    """See `FusedReplica`."""

    def __init__(self, model: Any, data: Any) -> None:
        self._model = model
        self._structure = data
        self._train = self._compile(model.train_step)
        self._test = self._compile(model.test_step)
        self._predict = self._compile(model.predict_step)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function) if self._model.jit_compile else function
        return compiled

    def train(self, data: Any) -> Logs:
        if not self._model.training:
            self._model.train()
        logs: Logs = self._train(self._pack(data))
        return logs

    def test(self, data: Any) -> Logs:
        self._to_evaluation()
        with torch.no_grad():
            logs: Logs = self._test(self._pack(data))
        return logs

    def predict(self, data: Any) -> Any:
        self._to_evaluation()
        with torch.no_grad():
            outputs = self._predict(self._pack(data))
        return keras.tree.map_structure(lambda tensor: np.array(tensor.detach().cpu().numpy()), outputs)

    def _to_evaluation(self) -> None:
        if self._model.training:
            self._model.eval()

    def _pack(self, data: Any) -> Any:
        return pack_batch(self._structure, as_tensors(data))
