"""A replica on the TensorFlow backend: graphs without callbacks, and plain arrays between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from numpy.typing import NDArray

from insitu.train.backends.tensorflow.calls import RelaxingCall, borrow, compile_call
from insitu.train.replica import (
    EXTRA_LOGS,
    SEED_STRIDE,
    BaseReplica,
    BatchTotals,
    CombinationPlan,
    Logs,
    LossCounts,
    Operation,
    RecordLayout,
    Span,
    capture_gradients,
    count_losses,
    flatten_batch,
    pack_batch,
    refuse_use_of_updated,
    tell_repeated_rows,
    watch_step,
)


class TensorFlowReplica(BaseReplica):
    """See `Replica`."""

    def __init__(self, model: Any, data: Any, plan: CombinationPlan | None = None) -> None:
        super().__init__(model, data, plan)
        self._copies_gradients = any(
            getattr(v, "overwrite_with_gradient", False) for v in self._state.trainable
        )
        self._applied = False
        self._shard_numbers: dict[int, Any] = {}
        #: Variables from which traced steps read totals: of training, and of tests. Written by `set_totals`.
        self._totals: dict[bool, BatchTotals] = {}
        #: Variables whose values `gradient` returns as well. Written by `watch_weights`.
        self._watched: Sequence[Any] = ()
        self._watched_values: Sequence[Any] = ()
        #: Totals that are computed in the graph that is being traced; else None.
        self._traced_totals: BatchTotals | None = None
        self._batch_specs = [batch_spec(leaf) for leaf in flatten_batch(data)]
        self._forget_traces()
        floats = [tf.TensorSpec((p.stop - p.start,), self.floats_dtype.name) for p in self._all_buckets]
        self._apply = self._compile(
            self._trace_apply, [tf.TensorSpec((self.train_record_size,), tf.float64), *floats]
        )
        self._load = self._compile(
            self._trace_load, [tf.TensorSpec((self.train_record_size,), tf.float64), *floats], jit=False
        )
        self._merge = self._compile(self._trace_merge, [tf.TensorSpec((self.test_record_size,), tf.float64)])
        self._predict = self._compile(self._trace_predict, self._batch_specs)

    def _forget_traces(self) -> None:
        """Make the functions that depend on whether losses need totals."""
        batch = self._batch_specs
        with_shard = [tf.TensorSpec((), tf.int64), *batch]
        self._gradient = self._compile(self._trace_gradient, with_shard)
        self._evaluate = self._compile(self._trace_evaluate, with_shard)
        self._counts = {
            training: self._compile(partial(self._trace_counts, training), with_shard)
            for training in (True, False)
            if self.needs_totals(training=training)
        }

    def _compile(
        self, function: Callable[..., Any], signature: Sequence[Any], *, jit: bool = True
    ) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        # One trace for every batch size: a trace per size could round differently, and which sizes a
        # process meets depends on the shards that it happens to host.
        jit_compile = (jit and bool(self._model.jit_compile)) or None
        return compile_call(function, signature, jit_compile=jit_compile)

    # The interface of `Replica`

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        self._plan.check_train()
        with self._noting_needs(training=True):
            outputs = self._gradient(self._number(shard), *_tensors(data))
        self._watched_values = outputs[1 + len(self._all_buckets) :]
        for bucket, tensor in zip(self._all_buckets, outputs[1:], strict=False):
            self.copy_out(floats[bucket.start : bucket.stop], _view(tensor))
        np.copyto(record, _view(outputs[0]))

    def watch_weights(self, variables: Sequence[Any]) -> bool:
        """See `Replica`. The compiled step reads its variables anyway; to read each by a call of its own
        takes longer than the step of a small model."""
        self._watched = variables
        self._forget_traces()
        return True

    def take_watched(self) -> Sequence[NDArray[Any]]:
        """See `Replica`. Nothing keeps the values' memory, which an update may then use again."""
        values, self._watched_values = self._watched_values, ()
        return [_view(value) for value in values]

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=True)
        as_tensor = _copy if self._copies_gradients else borrow
        buckets = [as_tensor(floats[p.start : p.stop]) for p in self._gradient_buckets]
        buckets += [_copy(floats[p.start : p.stop]) for p in self._mean_buckets]
        logs = self._apply(tf.constant(combined), *buckets)
        if not self._applied:
            self._applied = True
            self._stop_borrowing_if_kept(floats)
        return self._to_logs(logs, combined, training=True)

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=True)
        # Large variables end up in the memory of `floats`, without a copy.
        buckets = [borrow(floats[p.start : p.stop]) for p in self._all_buckets]
        return self._to_logs(self._load(tf.constant(combined), *buckets), combined, training=True)

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        self._plan.check_test()
        with self._noting_needs(training=False):
            np.copyto(record, _view(self._evaluate(self._number(shard), *_tensors(data))))

    def merge(self, records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=False)
        return self._to_logs(self._merge(tf.constant(combined)), combined, training=False)

    def predict(self, data: Any) -> Any:
        return keras.tree.map_structure(lambda t: np.array(_view(t)), self._predict(*_tensors(data)))

    def set_totals(self, batch: BatchTotals, *, training: bool) -> None:
        """See `Replica`."""
        held, values = self._totals.get(training), tf.nest.flatten(batch)
        if held is None or any(not v.shape.is_compatible_with(a.shape) for v, a in _pairs(held, values)):
            if held is not None:
                self._forget_traces()
            self._totals[training] = held = _make_variables(batch)
        for variable, value in _pairs(held, values):
            variable.assign(value)

    def _count(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        totals, *rows = self._counts[training](self._number(shard), *_tensors(data))
        return LossCounts(np.array(_view(totals)), [np.array(_view(each)) for each in rows])

    def _number(self, shard: int) -> Any:
        if shard not in self._shard_numbers:
            self._shard_numbers[shard] = tf.constant(shard, tf.int64)
        return self._shard_numbers[shard]

    # Traced functions

    def _trace_counts(self, training: bool, shard: Any, *leaves: Any) -> list[Any]:
        """Return what the losses of a step add to their totals, and the rows that those over the global batch
        get. A graph computes nothing else."""
        state, model = self._state, self._model
        with (
            _restored(state.moved if training else state.moved_in_tests),
            count_losses(model) as counts,
            self._shifted_seeds(shard),
        ):
            if training:
                with capture_gradients(model.optimizer, trains=bool(state.trainable)):
                    model.train_step(self._pack(leaves))
            else:
                model.test_step(self._pack(leaves))
        totals = tf.cast(tf.stack(counts.totals), tf.float64) if counts.totals else tf.zeros((0,), tf.float64)
        return [totals, *counts.rows]

    @contextmanager
    def _shifted_seeds(self, shard: Any) -> Iterator[None]:
        """While open, seeds are those of the shard."""
        stride = tf.stack([shard * SEED_STRIDE, tf.zeros((), tf.int64)])
        for variable in self._state.seeds:
            variable.assign(variable.value + tf.cast(stride, variable.dtype))
        yield
        for variable in self._state.seeds:
            variable.assign(variable.value - tf.cast(stride, variable.dtype))

    def _totals_of(self, shard: Any, *, training: bool) -> BatchTotals | None:
        batch = self._totals.get(training) if self._traced_totals is None else self._traced_totals
        if batch is None:
            return None
        totals, rows, starts = tf.nest.map_structure(tf.convert_to_tensor, batch)
        return BatchTotals(totals, rows, tf.gather(starts, shard))

    def _trace_gradient(self, shard: Any, *leaves: Any) -> list[Any]:
        state = self._state
        rows = tf.shape(leaves[0])[0]
        watched = [tf.identity(variable.value) for variable in self._watched]
        with _restored(state.moved) as before:
            for variable in state.sums:
                variable.assign(tf.zeros_like(variable.value))
            with (
                self._shifted_seeds(shard),
                watch_step(self._model) as watch,
                self._dividing(self._totals_of(shard, training=True), rows, training=True),
                self._captured_gradients() as captured,
                refuse_use_of_updated(self._model, captured.is_applied),
            ):
                logs = self._model.train_step(self._pack(leaves))
            extra = self._record_logs(logs, watch, training=True)
            record = self._read_record(self._train_record, rows, before, extra)
            ordered = self._order_gradients(captured)
            gradients = [self._dense(*pair) for pair in zip(self._state.trainable, ordered, strict=True)]
            averages = [tf.identity(variable.value) for variable in state.mean]
        return [record, *self._join(gradients, averages), *watched]

    def _trace_apply(self, combined: Any, *buckets: Any) -> Any:
        self._write_record(self._train_record, combined)
        self._trace_update(*buckets)
        return self._metric_logs(training=True)

    def _trace_update(self, *buckets: Any) -> None:
        state = self._state
        gradients, means = self._split(buckets)
        for variable, value in zip(state.mean, means, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        updates = [
            (None if index in self._without_gradient else tf.cast(gradient, variable.dtype), variable)
            for index, (gradient, variable) in enumerate(zip(gradients, state.trainable, strict=True))
        ]
        if updates:
            self._model.optimizer.apply_gradients(updates)

    def _trace_load(self, combined: Any, *buckets: Any) -> Any:
        state = self._state
        floats, means = self._split(buckets)
        for variable, value in zip((*state.trainable, *state.mean), (*floats, *means), strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        self._write_record(self._train_record, combined)
        return self._metric_logs(training=True)

    def _trace_evaluate(self, shard: Any, *leaves: Any) -> Any:
        state = self._state
        with _restored(state.moved_in_tests) as before:
            for variable in state.sums:
                variable.assign(tf.zeros_like(variable.value))
            rows = tf.shape(leaves[0])[0]
            with (
                self._shifted_seeds(shard),
                watch_step(self._model) as watch,
                self._dividing(self._totals_of(shard, training=False), rows, training=False),
            ):
                logs = self._model.test_step(self._pack(leaves))
            extra = self._record_logs(logs, watch, training=False)
            return self._read_record(self._test_record, rows, before, extra)

    def _trace_merge(self, combined: Any) -> Any:
        self._write_record(self._test_record, combined)
        return self._metric_logs(training=False)

    def _trace_predict(self, *leaves: Any) -> Any:
        return self._model.predict_step(self._pack(leaves))

    # Helpers

    def _learn_logs(self, *, training: bool) -> None:
        function = self._gradient if training else self._evaluate
        if isinstance(function, RelaxingCall):
            function.trace()
        else:
            function(tf.constant(0, tf.int64), *_tensors(self._structure))

    def _read_record(
        self, layout: RecordLayout, rows: Any, before: Mapping[int, Any], extra: Sequence[Any]
    ) -> Any:
        parts = [tf.reshape(tf.cast(rows, tf.float64), (1,))]
        values = [v.value for v, _ in (*layout.sums, *layout.firsts)]
        values += [
            v.value - before[id(v)] if operation is Operation.SUM_OF_CHANGES else v.value
            for v, _, operation in layout.others
        ]
        parts += [tf.reshape(tf.cast(value, tf.float64), (-1,)) for value in values]
        parts += [tf.reshape(tf.cast(value, tf.float64), (1,)) for value in extra]
        parts.append(tf.zeros((EXTRA_LOGS - len(extra),), tf.float64))
        return tf.concat(parts, 0)

    def _write_record(self, layout: RecordLayout, combined: Any) -> None:
        self._write_state(layout, combined)
        for variable, span in layout.sums:
            variable.assign_add(self._part(variable, span, combined))

    @classmethod
    def _write_state(cls, layout: RecordLayout, combined: Any) -> None:
        """Write all but sums of metrics."""
        for variable, span in layout.firsts:
            variable.assign(cls._part(variable, span, combined))
        for variable, span, operation in layout.others:
            if operation is Operation.SUM_OF_CHANGES:
                variable.assign_add(cls._part(variable, span, combined))
            else:
                variable.assign(cls._part(variable, span, combined))

    @staticmethod
    def _part(variable: Any, span: Span, combined: Any) -> Any:
        return tf.cast(tf.reshape(combined[span.start : span.stop], span.shape), variable.dtype)

    def _dense(self, variable: Any, gradient: Any) -> Any:
        """Return a whole gradient, also if there is none or only some rows have one."""
        if gradient is None:
            return tf.zeros(variable.shape, self.floats_dtype.name)
        return tf.convert_to_tensor(gradient)

    def _stop_borrowing_if_kept(self, floats: NDArray[Any]) -> None:
        """Copy gradients from now on, if an optimizer keeps one as it is. TensorFlow lets a variable share
        the memory of the tensor that is assigned to it, here our buffer, which the next step overwrites."""
        start = floats.ctypes.data
        for variable in (*self._state.trainable, *self._state.optimizer):
            address = _view(variable.value.read_value()).ctypes.data
            if start <= address < start + floats.nbytes:
                self._copies_gradients = True
                variable.assign(np.array(_view(variable.value.read_value())))


@contextmanager
def _restored(variables: Sequence[Any]) -> Iterator[Mapping[int, Any]]:
    """Restore the values of `variables` after the block. Gives them by id."""
    saved = {id(variable): tf.identity(variable.value) for variable in variables}
    try:
        yield saved
    finally:
        for variable in variables:
            variable.assign(saved[id(variable)])


def _make_variables(batch: BatchTotals) -> BatchTotals:
    """Return variables for such values, with any number of rows."""
    rows = [tf.Variable(each, trainable=False, shape=(None, *each.shape[1:])) for each in batch.rows]
    totals, starts = (tf.Variable(each, trainable=False) for each in (batch.totals, batch.start))
    return BatchTotals(totals, rows, starts)


def _pairs(held: Any, values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(tf.nest.flatten(held), values, strict=True)


def batch_spec(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return tf.TensorSpec((None, *array.shape[1:]), tf.as_dtype(array.dtype))


def _view(tensor: Any) -> NDArray[Any]:
    """Return the tensor's own memory, without a copy."""
    array: NDArray[Any] = np.asarray(tensor)
    return array


def _copy(array: NDArray[Any]) -> Any:
    return tf.constant(array)


# A replica without peers: each step is one call


class FusedTensorFlow:
    """See `FusedReplica`."""

    def __init__(self, model: Any, data: Any) -> None:
        self._model = model
        self._structure = data
        self._train, self._test, self._predict = map(
            self._compile, ("train_step", "test_step", "predict_step")
        )

    def _compile(self, name: str) -> Callable[..., Any]:
        model = self._model

        def step(*leaves: Any) -> Any:
            with add_up_repeated_rows(model) if name == "train_step" else nullcontext():
                return getattr(model, name)(pack_batch(self._structure, leaves))

        if model.run_eagerly:
            return step
        signature = [batch_spec(leaf) for leaf in flatten_batch(self._structure)]
        return compile_call(step, signature, jit_compile=bool(model.jit_compile) or None)

    def train(self, data: Any) -> Logs:
        logs: Logs = self._train(*_tensors(data))
        return logs

    def test(self, data: Any) -> Logs:
        logs: Logs = self._test(*_tensors(data))
        return logs

    def predict(self, data: Any) -> Any:
        return keras.tree.map_structure(np.array, self._predict(*_tensors(data)))


def _tensors(data: Any) -> list[Any]:
    return [tf.constant(leaf) for leaf in flatten_batch(data)]


@contextmanager
def add_up_repeated_rows(model: Any) -> Iterator[None]:
    """While open, optimizers get each row of a sparse gradient once.

    The gradient of an Embedding has an entry for each time that a batch looks a row up. Keras squares and
    clips each entry by itself; a dense gradient, as replicas exchange it, has their sum.
    """
    original = BaseOptimizer.apply
    # XLA knows no arrays whose size depends on values.
    add_up = _make_dense if model.jit_compile else _add_up

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        tell_repeated_rows(optimizer, grads, trainable_variables or optimizer._trainable_variables)
        summed = [add_up(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        return original(optimizer, summed, trainable_variables)

    BaseOptimizer.apply = apply
    try:
        yield
    finally:
        BaseOptimizer.apply = original


def _add_up(gradient: Any) -> Any:
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _make_dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient)
