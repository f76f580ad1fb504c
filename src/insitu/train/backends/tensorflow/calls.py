"""Choose how a compiled TensorFlow function is called: the faster of two modes, for the shapes that come."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

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
