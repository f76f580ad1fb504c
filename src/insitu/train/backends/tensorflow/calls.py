"""Choose how a compiled TensorFlow function is called: the faster of two modes, for the shapes that come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.ops import gen_resource_variable_ops

from insitu.exchange import ALIGNMENT, address_of

SEQUENTIAL, PARALLEL = "one operation after the other", "independent operations in parallel"
TIMED_CALLS = 3
"""Calls of each mode, of which the fastest counts."""
SLOW_CALL_SECONDS = 10e-3
"""Seconds. A call's cost is nothing to a function that takes as long, and preparing it for the other mode may
take longer than all its calls."""

Shape = tuple[int | None, ...]
"""Sizes of a tensor's dimensions; None for one that is left open."""


def compile_function(function: Callable[..., Any], **options: Any) -> Any:
    """Return a `tf.function` of insitu's own.

    Each model and kind of step has some that are made of the same lines. TensorFlow would warn that one
    function is compiled again and again, by a name that no user knows.
    """
    compiled = tf.function(function, **options)
    compiled._omit_frequent_tracing_warning = True
    return compiled


class CallModeChooser:
    """Chooses the faster mode of calling a function, by the durations of its first calls. Pure.

    `mode` is how to call it next; once `chosen`, it stays.
    """

    def __init__(self) -> None:
        self.mode = PARALLEL
        self.chosen = False
        self._shapes: Any = None
        self._seconds: dict[str, list[float]] = {PARALLEL: [], SEQUENTIAL: []}
        self._prepared = False

    def add_duration(self, shapes: Any, seconds: float) -> None:
        """Record the seconds of a call with arguments of these shapes. Only calls with equal shapes are
        compared."""
        if not self._prepared:
            self._prepared = True  # the first call does what is done once
            self._shapes = self._shapes or shapes
            return
        if shapes != self._shapes:
            return
        durations = self._seconds[self.mode]
        durations.append(seconds)
        if len(durations) < TIMED_CALLS:
            return
        if self.mode == PARALLEL and min(durations) < SLOW_CALL_SECONDS:
            self.mode, self._prepared = SEQUENTIAL, False
            return
        if self.mode == SEQUENTIAL and min(self._seconds[PARALLEL]) < min(durations):
            self.mode = PARALLEL
        self.chosen = True


class CompiledCall:
    """A tf.function of one signature, called with tensors or NumPy arrays in the chooser of two modes.

    A call through TensorFlow's Python checks and sorts its arguments, and hands the function's operations
    to threads, which do those side by side that don't wait for each other. For a small model both take
    longer than the step. Called by the operation that it ends in, the function takes its tensors at once, and
    this thread does one operation after the other; but variables must be on one device, and XLA
    (jit_compile) is left out. The results are the same bits.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._concrete: Any = None
        self._chooser = CallModeChooser()

    def __call__(self, *tensors: Any) -> Any:
        self.trace()
        if self._chooser.chosen:
            return self._call(tensors)
        started = time.perf_counter()
        outputs = self._call(tensors)
        self._chooser.add_duration([tensor.shape for tensor in tensors], time.perf_counter() - started)
        return outputs

    def _call(self, tensors: Any) -> Any:
        if self._chooser.mode == PARALLEL:
            return self._concrete(*tensors)
        outputs = tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, *self._captured], Tout=self._dtypes, f=self._concrete
        )
        return self._pack(outputs)

    def trace(self) -> None:
        """Trace the function, if it hasn't been."""
        if self._concrete is not None:
            return
        self._concrete = self._function.get_concrete_function()
        self._captured = self._concrete.captured_inputs
        several_devices = len({tensor.device for tensor in self._captured}) > 1
        if several_devices or "_XlaMustCompile" in self._concrete.function_def.attr:
            self._chooser.chosen = True
        elif _runs_sequentially():
            self._chooser.mode, self._chooser.chosen = SEQUENTIAL, True
        self._dtypes = [tensor.dtype for tensor in self._concrete.outputs]
        self._pack = _make_packer(self._concrete.structured_outputs, len(self._dtypes))


class RelaxingCall:
    """A function that is compiled for a signature, and again if arguments have other sizes, such as longer
    sequences. Those sizes are left open from then on, as in Keras' own functions.

    Shapes are compared here, since a function that is called by its operation would take any.
    """

    def __init__(
        self, compile_for: Callable[[list[tf.TensorSpec]], Any], signature: Sequence[tf.TensorSpec]
    ) -> None:
        self._compile_for = compile_for
        self._compile([tuple(spec.shape) for spec in signature], [spec.dtype for spec in signature])

    def _compile(self, shapes: list[Shape], dtypes: list[Any]) -> None:
        #: Shape of each argument. Written here, as are the following.
        self._shapes = shapes
        self._dtypes = dtypes
        #: The shapes of rows, with the index of the argument, of those that may have any number of rows.
        self._rows = [(index, shape[1:]) for index, shape in enumerate(shapes) if shape[:1] == (None,)]
        self._compiled = self._compile_for(list(map(tf.TensorSpec, shapes, dtypes)))

    def __call__(self, *tensors: Any) -> Any:
        for index, row in self._rows:
            if _shape_of(tensors[index])[1:] != row:
                self._relax(tensors)
                break
        return self._compiled(*tensors)

    def _relax(self, tensors: Sequence[Any]) -> None:
        shapes = [_relax(*pair) for pair in zip(map(_shape_of, tensors), self._shapes, strict=True)]
        if shapes != self._shapes:
            self._compile(shapes, self._dtypes)

    def trace(self) -> None:
        """Trace the function, if it hasn't been."""
        self._compiled.trace()


def _shape_of(tensor: Any) -> Shape:
    # Not `shape`: TensorFlow makes an object for it, which takes longer than all else here.
    shape: Shape = tensor._shape_tuple() if isinstance(tensor, tf.Tensor) else tensor.shape
    return shape


def _relax(shape: Shape, wanted: Shape) -> Shape:
    """Return the shape that is wanted, with the sizes left open in which `shape` differs."""
    if len(shape) != len(wanted):
        return None, *shape[1:]
    return tuple(size if size == own else None for own, size in zip(shape, wanted, strict=True))


def compile_call(
    function: Callable[..., Any], signature: Sequence[tf.TensorSpec], *, jit_compile: bool | None
) -> RelaxingCall:
    """Return `function` compiled for tensors like `signature`, called in the faster mode."""
    function = tf.autograph.experimental.do_not_convert(function)

    def compile_for(specs: list[tf.TensorSpec]) -> CompiledCall:
        return CompiledCall(compile_function(function, input_signature=specs, jit_compile=jit_compile))

    return RelaxingCall(compile_for, signature)


def _runs_sequentially() -> bool:
    """Return True if TensorFlow has one thread, or one core, for independent operations."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    threads = threads or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    return threads == 1 or len(os.sched_getaffinity(0)) == 1


def _make_packer(structure: Any, count: int) -> Callable[[Any], Any]:
    """Return a function that puts `count` outputs into `structure`. Lists and dicts of tensors, as most are,
    need no walk through the structure."""
    indices = tf.nest.pack_sequence_as(structure, list(range(count)))
    if type(indices) is list and indices == list(range(count)):
        return list
    if type(indices) is dict and all(type(index) is int for index in indices.values()):
        return lambda outputs: {name: outputs[index] for name, index in indices.items()}
    return lambda outputs: tf.nest.pack_sequence_as(structure, outputs)


# The update of pieces of variables, on parameter servers


def compile_update(optimizers: Sequence[Any], clip: Callable[[Any], Any], *, jit: bool) -> Callable[..., Any]:
    """See `Backend`."""
    held = [v for made in optimizers for v in (made.variable, *made.slots.values())]
    pieces = [made.variable for made in optimizers]

    def function(step: Any, rate: Any, *arrays: Any) -> Any:
        for variable, array in zip(held, arrays, strict=False):
            variable.assign(array)
        for made in optimizers:
            made.counter.assign(tf.cast(step, made.counter.dtype))
            if made.rate is not None:
                made.rate.assign(tf.cast(rate, made.rate.dtype))
        gradients = clip(arrays[len(held) :])
        for made, gradient in zip(optimizers, gradients, strict=True):
            made.optimizer.apply([gradient], [made.variable])
        return [tf.identity(v.value) for v in held]

    signature = [tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.float32)]
    signature += [tf.TensorSpec(v.shape, v.dtype) for v in (*held, *pieces)]
    compiled = CompiledCall(
        tf.function(
            tf.autograph.experimental.do_not_convert(function),
            input_signature=signature,
            jit_compile=jit or None,
        )
    )

    def update(values: Any, slots: Any, gradients: Any, step: int, rate: float) -> Any:
        own = [array for value, state in zip(values, slots, strict=True) for array in (value, *state)]
        when = tf.constant(step, tf.int64), tf.constant(rate, tf.float32)
        outputs = compiled(*when, *map(borrow, own), *map(borrow, gradients))
        outputs = iter(_copy_aliased(outputs, [*own, *gradients]))
        updated, moved = [], []
        for state in slots:
            updated.append(next(outputs))
            moved.append([next(outputs) for _ in state])
        return updated, moved

    return update


def _copy_aliased(outputs: Sequence[Any], arguments: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the outputs as arrays, copied if one is in an argument's memory, which is about to change:
    an optimizer may have assigned a variable, as it was, to a slot."""
    taken = {address_of(array) for array in arguments}
    arrays = [np.asarray(output) for output in outputs]
    return [array.copy() if address_of(array) in taken else array for array in arrays]


# Exchange memory between tensors, variables and NumPy arrays without copies


_MIN_LENT_BYTES = 1 << 16
"""Bytes of an array from which on saving a copy pays."""


def borrow(array: NDArray[Any]) -> Any:
    """Return a tensor in the array's own memory, if its alignment and dtype allow. Use it before the array
    changes."""
    if array.ctypes.data % ALIGNMENT or array.dtype.kind == "V" or not array.flags.writeable:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def lend(array: NDArray[Any]) -> Any:
    """See `Backend`. A variable would copy an array twice."""
    worthwhile = array.nbytes >= _MIN_LENT_BYTES and array.dtype.kind in "fiu" and array.flags.writeable
    return borrow(array) if worthwhile else array


def view(variable: Any) -> NDArray[Any]:
    """See `Backend`.

    The bare operation takes a fifth of the time of `read_value`, which also serves gradients and graphs. Each
    step of parameter servers looks at all variables.
    """
    raw = variable.value
    return np.asarray(gen_resource_variable_ops.read_variable_op(raw.handle, raw.dtype))
