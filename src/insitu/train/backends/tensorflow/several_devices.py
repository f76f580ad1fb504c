"""One TensorFlow function over several devices of this process: all gradients, their mean, the updates."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from insitu.train.backends.tensorflow.calls import RelaxingCall, compile_function
from insitu.train.backends.tensorflow.replica import TensorFlowReplica
from insitu.train.devices import Device
from insitu.train.placement import Placements
from insitu.train.replica import (
    GLOBAL,
    BatchTotals,
    CombinationPlan,
    Logs,
    NeedsTotals,
    Operation,
    RecordLayout,
    ShardBatch,
    StepLogs,
    find_rows,
    flatten_batch,
    is_floating,
    map_batch,
)


class TensorFlowMultiDeviceReplica(TensorFlowReplica):
    """The replica of a model on each of `devices`, all traced into one function.

    Without `home`, each device has its own copy of all variables and updates it. With it there is one copy,
    on the device `home`, which all read and which is updated there; only the state that a forward pass moves
    (BatchNorm, seeds, metrics: small) is copied to each device in each step. XLA (jit_compile) needs
    everything on one device: with a home it isn't used.

    The mean over devices weighs each row the same and adds in the order of the shards, by copies between the
    devices.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        devices: Sequence[str],
        shards: Sequence[int],
        home: str | None = None,
        plan: CombinationPlan | None = None,
    ) -> None:
        super().__init__(model, data, plan)
        self._mirrored = mirrored = home is None
        # Devices with variables: the home first, which computes nothing.
        self._all_devices = tuple(devices) if home is None else (home, *devices)
        self._computing_devices = tuple(range(len(self._all_devices) - len(devices), len(self._all_devices)))
        self._shards = tuple(shards)
        state = self._state
        moved = state.moved
        every = (*state.trainable, *moved, *state.optimizer, *_only_read(model)) if mirrored else moved
        self._mirrors: MirroredVariables = mirror_variables(model, every, self._all_devices)
        batch = self._batch_specs
        self._width = len(batch)
        signature = [tf.TensorSpec((len(devices),), tf.float64), *(batch * len(devices))]
        self._signature = signature
        #: The mean gradient of the last step, a variable for each bucket, if it is kept. Written by
        #: `keep_gradients`.
        self._kept: list[Any] = []
        self._compile_steps()
        self._predict_all = self._compile_all(self._trace_predict_all, signature)
        buckets = [tf.TensorSpec((p.stop - p.start,), self.floats_dtype.name) for p in self._all_buckets]
        combined = tf.TensorSpec((self.train_record_size,), tf.float64)
        self._apply_all = self._compile_all(self._trace_apply_all, [combined, *buckets])

    def keep_gradients(self) -> None:
        """Have the compiled step write the mean gradient of each step to variables of its own."""
        if self._kept:
            return
        with tf.device("CPU:0"):
            self._kept = [
                tf.Variable(tf.zeros((p.stop - p.start,), self.floats_dtype.name), trainable=False)
                for p in self._all_buckets
            ]
        self._compile_steps()

    def read_gradients(self) -> dict[str, NDArray[Any]]:
        """Return the mean gradient of the last step, by the path of the variable."""
        if not self._kept:
            return {}
        flat = np.concatenate([np.asarray(kept) for kept in self._kept])
        spans = [(variable, span) for variable, span in self.float_spans() if variable.trainable]
        return {v.path: flat[span.start : span.stop].reshape(span.shape) for v, span in spans}

    def _compile_steps(self) -> None:
        """Make the functions that depend on whether losses need totals."""
        self._train_all = self._compile_all(self._trace_train_all, self._signature)
        self._test_all = self._compile_all(self._trace_test_all, self._signature)
        self._gradients_all = self._compile_all(self._trace_gradients_all, self._signature)

    def watch_weights(self, variables: Sequence[Any]) -> bool:
        """Watch nothing: one function computes the gradients of all devices."""
        return False

    def _forget_traces(self) -> None:
        super()._forget_traces()
        if hasattr(self, "_signature"):
            self._compile_steps()

    def _compile_all(self, function: Callable[..., Any], signature: Sequence[Any]) -> Callable[..., Any]:
        if self._model.run_eagerly:
            return function
        function = tf.autograph.experimental.do_not_convert(function)
        # Called as TensorFlow has it: by its bare operation, variables would all seem to be on one device.
        return RelaxingCall(lambda specs: compile_function(function, input_signature=specs), signature)

    # Called with a part for each device

    def train(self, parts: Sequence[ShardBatch]) -> Logs:
        self._plan.check_train()
        logs: Logs = self._call(parts, training=True)
        return logs

    def test(self, parts: Sequence[ShardBatch]) -> Logs:
        self._plan.check_test()
        logs: Logs = self._call(parts, training=False)
        return logs

    def _call(self, parts: Sequence[ShardBatch], *, training: bool) -> Any:
        """Return what the step of all devices returns. It is traced again if losses turn out to need totals,
        which the function then adds up by itself."""
        arguments = self._arguments(parts)
        try:
            with self._noting_needs(training=training):
                return (self._train_all if training else self._test_all)(*arguments)
        except NeedsTotals:
            if find_rows(self._model) == GLOBAL:
                # The function would join whatever the losses get.
                self.count_losses(0, next(part.data for part in parts if part.rows), training=training)
            return (self._train_all if training else self._test_all)(*arguments)

    def predict_parts(self, parts: Sequence[ShardBatch]) -> list[Any]:
        """Return the outputs of each part, None for one without rows."""
        outputs = self._predict_all(*self._arguments(parts))
        return [
            keras.tree.map_structure(np.array, output) if part.rows else None
            for part, output in zip(parts, outputs, strict=True)
        ]

    def gradients(self, parts: Sequence[ShardBatch], floats: Any, records: Any) -> None:
        """Do as `Replica.gradient` for each part, into the rows of `floats` and `records`."""
        self._plan.check_train()
        self.refresh(force=False)
        outputs = self._all_gradients(parts)
        for index, part in enumerate(parts):
            records[index] = 0
            if part.rows:
                np.copyto(records[index], np.asarray(outputs[index][0]))
                for bucket, tensor in zip(self._all_buckets, outputs[index][1:], strict=True):
                    np.copyto(floats[index, bucket.start : bucket.stop], np.asarray(tensor))

    def _all_gradients(self, parts: Sequence[ShardBatch]) -> list[list[Any]]:
        """Return the record and the buckets of each part, as tensors."""
        with self._noting_needs(training=True):
            results: list[list[Any]] = self._gradients_all(*self._arguments(parts))
        return results

    def apply(self, floats: Any, records: Any) -> Logs:
        """Update the model on each device by the mean over all tasks."""
        combined = self._combine_records(records, training=True)
        buckets = [tf.constant(floats[p.start : p.stop]) for p in self._all_buckets]
        return self._to_logs(self._apply_all(tf.constant(combined), *buckets), combined, training=True)

    def refresh(self, *, force: bool) -> None:
        """Copy assignments from outside of steps to all devices, if there were any or with `force`."""
        if self._mirrored and (force or self._mirrors.stale):
            self._mirrors.refresh()

    def _arguments(self, parts: Sequence[ShardBatch]) -> list[Any]:
        rows = np.array([part.rows for part in parts], np.float64)
        # A device without rows computes something that weighs nothing: a graph without branches is faster.
        padding = self._make_padding(parts)
        with tf.device("CPU:0"):
            leaves = [
                tf.convert_to_tensor(leaf)
                for part in parts
                for leaf in flatten_batch(part.data if part.rows else padding)
            ]
            return [tf.constant(rows), *leaves]

    def _make_padding(self, parts: Sequence[ShardBatch]) -> Any:
        """Return a batch of one row, for devices without rows."""
        return map_batch(lambda leaf: leaf[:1], next(part.data for part in parts if part.rows))

    # Traced functions

    def _trace_train_all(self, rows: Any, *leaves: Any) -> Any:
        with self._adding_up(rows, leaves, training=True):
            outputs = self._trace_gradients_all(rows, *leaves)
        return self._update_all(outputs, rows)

    @contextmanager
    def _adding_up(self, rows: Any, leaves: Sequence[Any], *, training: bool) -> Iterator[None]:
        """While open, the losses of all devices know of the whole batch, if they need to."""
        if not self.needs_totals(training=training):
            yield
            return
        if not self._mirrored:
            self._mirrors.trace_copying()
        outputs = [
            self._run_on(
                device_index, partial(self._trace_counts, training), tf.constant(shard, tf.int64), *own
            )
            for device_index, shard, own in zip(
                self._computing_devices, self._shards, self._by_replica(leaves), strict=True
            )
        ]
        with tf.device("CPU:0"):
            # Counts of a device without rows are of other rows.
            counts = [output[0] for output in outputs]
            own = [
                tf.math.multiply_no_nan(c, tf.sign(r)) for c, r in zip(counts, tf.unstack(rows), strict=True)
            ]
            totals = tf.concat([tf.reduce_sum(rows, keepdims=True), tf.add_n(own)], 0)
            sizes = tf.unstack(tf.cast(rows, tf.int32))
            starts = tf.cumsum(rows, exclusive=True)
        with tf.device(self._all_devices[0]):
            joined = [
                tf.concat([leaf[:size] for leaf, size in zip(same, sizes, strict=True)], 0)
                for same in zip(*(output[1:] for output in outputs), strict=True)
            ]
        self._traced_totals = BatchTotals(totals, joined, starts)
        try:
            yield
        finally:
            self._traced_totals = None

    def _update_all(self, outputs: Sequence[Sequence[Any]], rows: Any) -> Any:
        """Update the model on each device by the mean of the `outputs` of all, and return the logs."""
        combined = self._combine(self._train_record, [output[0] for output in outputs], rows)
        means = self._mean([output[1:] for output in outputs], rows)
        for kept, mean in zip(self._kept, means[0], strict=False):
            kept.assign(mean)
        metrics = self._update_devices(combined, means)
        return _merge_logs(self._logs[True], metrics, combined[self._train_record.extra_start :])

    def _trace_gradients_all(self, rows: Any, *leaves: Any) -> list[Any]:
        del rows
        if not self._mirrored:
            self._mirrors.trace_copying()
        return [
            self._run_on(device_index, self._trace_gradient, tf.constant(shard, tf.int64), *own)
            for device_index, shard, own in zip(
                self._computing_devices, self._shards, self._by_replica(leaves), strict=True
            )
        ]

    def _trace_apply_all(self, combined: Any, *buckets: Any) -> Any:
        return self._update_devices(combined, [list(buckets)] * len(self._all_devices))

    def _trace_test_all(self, rows: Any, *leaves: Any) -> Any:
        if not self._mirrored:
            self._mirrors.trace_copying()
        with self._adding_up(rows, leaves, training=False):
            records = [
                self._run_on(device_index, self._trace_evaluate, tf.constant(shard, tf.int64), *own)
                for device_index, shard, own in zip(
                    self._computing_devices, self._shards, self._by_replica(leaves), strict=True
                )
            ]
        combined = self._combine(self._test_record, records, rows)
        metrics = self._run_on(0, self._trace_merge, combined)
        if self._mirrored:
            # Sums begin from 0 in each step, wherever they are. Other state continues from its value.
            for device_index in range(1, len(self._all_devices)):
                self._run_on(device_index, self._write_state, self._test_record, combined)
        return _merge_logs(self._logs[False], metrics, combined[self._test_record.extra_start :])

    def _trace_predict_all(self, rows: Any, *leaves: Any) -> list[Any]:
        del rows
        if not self._mirrored:
            self._mirrors.trace_copying()
        outputs = [
            self._run_on(device_index, self._trace_predict_of, tf.constant(shard, tf.int64), *own)
            for device_index, shard, own in zip(
                self._computing_devices, self._shards, self._by_replica(leaves), strict=True
            )
        ]
        if not self._mirrored:
            seeds = self._run_on(self._computing_devices[0], self._read_seeds)
            self._run_on(0, self._write_seeds, *seeds)
        return outputs

    def _trace_predict_of(self, shard: Any, *leaves: Any) -> Any:
        with self._shifted_seeds(shard):
            return self._trace_predict(*leaves)

    def _read_seeds(self) -> list[Any]:
        return [tf.identity(variable.value) for variable in self._state.seeds]

    def _write_seeds(self, *values: Any) -> None:
        for variable, value in zip(self._state.seeds, values, strict=True):
            variable.assign(value)

    def _by_replica(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        return [leaves[start : start + self._width] for start in range(0, len(leaves), self._width)]

    def _run_on(self, device_index: int, function: Callable[..., Any], *args: Any) -> Any:
        """Trace `function` on a device with the variables of that device."""
        if self._mirrored and self._model.jit_compile and not self._model.run_eagerly:
            # XLA compiles for one device at a time.
            function = compile_function(function, jit_compile=True, autograph=False)
        with tf.device(self._all_devices[device_index]), self._mirrors.swapped_in(device_index):
            return function(*args)

    def _update_devices(self, combined: Any, means: Sequence[Sequence[Any]]) -> Any:
        logs = self._run_on(0, self._trace_apply, combined, *means[0])
        if self._mirrored:
            for device_index in range(1, len(self._all_devices)):
                self._run_on(device_index, self._trace_follow, combined, *means[device_index])
        return logs

    def _trace_follow(self, combined: Any, *buckets: Any) -> None:
        """Update without computing metrics."""
        self._write_state(self._train_record, combined)
        self._trace_update(*buckets)

    @staticmethod
    def _combine(layout: RecordLayout, records: Sequence[Any], rows: Any) -> Any:
        """Do as `RecordLayout.combine` in a graph, with the same sums in the same order."""
        with tf.device("CPU:0"):
            shares = rows / tf.reduce_sum(rows)
            sums = tf.zeros((layout.sums_stop,), tf.float64)
            extra = tf.zeros((layout.size - layout.extra_start,), tf.float64)
            # Some sums are averaged: their weight is the shard's share of the rows.
            averaged = np.isin(np.arange(layout.sums_stop), layout.averaged)
            for index, record in enumerate(records):
                weights = tf.sign(rows[index])
                if averaged.any():
                    weights = tf.where(averaged, shares[index], weights)
                sums += tf.math.multiply_no_nan(record[: layout.sums_stop], weights)
                extra += tf.math.multiply_no_nan(record[layout.extra_start :], shares[index])
            stacked = tf.stack(records)
            firsts_stop = layout.others[0][1].start if layout.others else layout.extra_start
            first = tf.gather(stacked, tf.argmax(rows > 0))
            others = []
            for variable, span, operation in layout.others:
                value = combine_in_graph(operation, stacked[:, span.start : span.stop], rows, shares)
                others.append(value if is_floating(variable) else tf.round(value))
            return tf.concat([sums, first[layout.sums_stop : firsts_stop], *others, extra], 0)

    def _mean(self, outputs: Sequence[Sequence[Any]], rows: Any) -> list[list[Any]]:
        """Return the mean of each bucket by rows, on each device."""
        with tf.device("CPU:0"):
            shares = tf.cast(rows / tf.reduce_sum(rows), self.floats_dtype.name)
        means = []
        for number, buckets in enumerate(zip(*outputs, strict=True)):
            # In turn, so that all devices have a part in it.
            with tf.device(self._all_devices[number % len(self._all_devices) if self._mirrored else 0]):
                total = tf.math.multiply_no_nan(buckets[0], shares[0])
                for index, bucket in enumerate(buckets[1:], 1):
                    total = total + tf.math.multiply_no_nan(bucket, shares[index])
                means.append(total)
        return [means] * len(self._all_devices)


def combine_in_graph(operation: Operation, values: Any, rows: Any, shares: Any) -> Any:
    """Do as `combine` in a graph. `values` has shape (shards, n); shards without rows have a share of 0."""
    active = rows[:, None] > 0
    match operation:
        case Operation.LARGEST:
            return tf.reduce_max(tf.where(active, values, values.dtype.min), 0)
        case Operation.SMALLEST:
            return tf.reduce_min(tf.where(active, values, values.dtype.max), 0)
        case Operation.FIRST:
            return tf.gather(values, tf.argmax(rows > 0))
    weights = tf.unstack(shares if operation is Operation.MEAN else tf.sign(rows))
    return tf.add_n([tf.math.multiply_no_nan(v, w) for v, w in zip(tf.unstack(values), weights, strict=True)])


def _merge_logs(logs: StepLogs | None, metrics: Any, extra: Any) -> Any:
    """Return what the step returns, with results of metrics over all devices and the means of the rest."""
    if logs is None:
        return {}
    return logs.merge(metrics, [extra[index] for index in range(len(logs.extra))])


def _only_read(model: Any) -> list[Any]:
    """Return the variables that a custom loop's step reads and leaves unchanged. Metrics among them have
    nothing to be read on further devices."""
    unmoved = getattr(model, "unmoved_variables", ())
    return [v for v in unmoved if getattr(v, "aggregation", None) != "sum"]


# Copies of a model's variables on further devices, kept equal to the variables that Keras knows


_ATTRIBUTE = "_insitu_mirrors"
_COPIES = "_insitu_copies"
_SCATTERS = ("update", "add", "sub", "mul", "div", "max", "min", "nd_update", "nd_add", "nd_sub")
_ASSIGNING = (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{name}" for name in _SCATTERS),
)
_RESTORING = "_restore_from_tensors"
"""A method that `tf.train.Checkpoint` calls, also while it traces a function that it calls at once."""


class MirroredVariables:
    """A `tf.Variable` for each Keras variable of `variables`, on each device but the first.

    On the first device that is the Keras variable's own. `on(i)` puts those of device `i` into their places,
    so that whatever is traced inside reads and writes them: any layer, any `train_step`, any optimizer.

    A step leaves all devices equal. Assignments between steps, by callbacks, `set_weights` or a metric's
    reset, reach the first device only; then `refresh` copies them to the others. Assignments by a compiled
    function of the user's own aren't seen.
    """

    def __init__(self, variables: Sequence[Any], devices: Sequence[str]) -> None:
        self.variables = tuple(variables)
        self._devices = tuple(devices)
        self._own = [variable._value for variable in self.variables]
        # Others may have made copies before, and not know what was assigned since.
        self.stale = any(hasattr(own, _COPIES) for own in self._own)
        self._copies: list[list[Any]] = [self._own]
        self._copies += [[_copy_on(device, own) for own in self._own] for device in self._devices[1:]]
        for own in self._own:
            _call_on_assign(own, self._mark_stale)
        self._copy = compile_function(self.trace_copying, autograph=False)

    def _mark_stale(self) -> None:
        self.stale = True

    @contextmanager
    def swapped_in(self, index: int) -> Iterator[None]:
        """While open, the Keras variables use the values of device `index`."""
        for variable, copy in zip(self.variables, self._copies[index], strict=True):
            variable._value = copy
        try:
            yield
        finally:
            for variable, own in zip(self.variables, self._own, strict=True):
                variable._value = own

    def refresh(self) -> None:
        """Copy the first device's values to all others."""
        self._copy()
        self.stale = False

    def trace_copying(self) -> None:
        values = [own.read_value() for own in self._own]
        for device, copies in zip(self._devices[1:], self._copies[1:], strict=True):
            with tf.device(device):
                for copy, value in zip(copies, values, strict=True):
                    copy.assign(value)


def mirror_variables(model: Any, variables: Sequence[Any], devices: Sequence[str]) -> MirroredVariables:
    """Return the mirrored variables of `model`, made once: its steps for batches of all structures share
    them."""
    mirrors: MirroredVariables | None = getattr(model, _ATTRIBUTE, None)
    if mirrors is None or list(map(id, mirrors.variables)) != list(map(id, variables)):
        mirrors = MirroredVariables(variables, devices)
        # Around Keras' tracking: copies are no part of the model's state.
        object.__setattr__(model, _ATTRIBUTE, mirrors)
    return mirrors


def _copy_on(device: str, own: Any) -> Any:
    """Return the copy of a variable on a further device. There is one for all models and steps that use
    it."""
    copies = own.__dict__.setdefault(_COPIES, {})
    if device not in copies:
        with tf.device(device):
            copies[device] = copy = tf.Variable(own.read_value(), trainable=own.trainable, dtype=own.dtype)
        # Keras' optimizers find what belongs to a variable by this.
        copy._unique_id = own._unique_id
    return copies[device]


def _call_on_assign(own: Any, changed: Any) -> None:
    """Call `changed` for each assignment outside of graphs."""

    def wrap(assign: Any, in_graphs: bool = False) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if in_graphs or not tf.inside_function():
                changed()
            return assign(*args, **kwargs)

        return call

    for name in _ASSIGNING:
        setattr(own, name, wrap(getattr(own, name)))
    setattr(own, _RESTORING, wrap(getattr(own, _RESTORING), in_graphs=True))


# Layers on chosen devices


_SCOPE = re.compile(r"(?:^|/)insitu_on_(\d+)_")
_devices: list[str] = []
"""The devices, by the numbers in names of scopes."""
_STEPS = ("train_step", "test_step", "predict_step")


class TensorFlowDeviceMover:
    """See `DeviceMover`."""

    def is_on(self, variable: Any, device: Device) -> bool:
        actual, expected = (
            tf.DeviceSpec.from_string(name) for name in (variable.value.device, device.native)
        )
        return bool(
            (actual.device_type, actual.device_index) == (expected.device_type, expected.device_index)
        )

    def move(self, variable: Any, device: Device) -> bool:
        return False

    def wrap(self, layer: Any, device: Device) -> None:
        call = layer.call
        if device.native not in _devices:
            _devices.append(device.native)
        # TensorFlow makes names of scopes unique by a suffix, after the last underscore.
        scope = f"insitu_on_{_devices.index(device.native)}_"

        @functools.wraps(call)
        def on_device(*args: Any, **kwargs: Any) -> Any:
            with tf.name_scope(scope), tf.device(device.native):
                return call(*args, **kwargs)

        object.__setattr__(layer, "call", on_device)

    def prepare(self, model: Any, optimizers: Sequence[Any], placements: Placements) -> None:
        """Compute gradients where the layer is: their names contain the scope of the layer."""
        if _devices:
            for name in filter(functools.partial(hasattr, model), _STEPS):
                object.__setattr__(model, name, _by_name(getattr(model, name)))


def _by_name(step: Callable[..., Any]) -> Callable[..., Any]:
    def device_of(operation: Any) -> str:
        found = _SCOPE.findall(operation.name)
        return _devices[int(found[-1])] if found else ""

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        if not tf.inside_function():
            return step(*args, **kwargs)
        with tf.compat.v1.get_default_graph().device(device_of):
            return step(*args, **kwargs)

    return stepped
