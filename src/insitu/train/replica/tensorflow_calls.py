"""How a compiled TensorFlow function is called: whichever way takes less time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

WITHIN, BESIDE = "one after the other", "side by side"
TRIES = 3
"""Calls of which the quickest tells how long a way takes."""
LONG = 10e-3
"""Seconds. What a call costs is nothing to a function that takes as long, and preparing it for the other way
may take longer than all its calls."""


class QuickerWay:
    """Which way of calling a function is quicker, by the seconds that its first calls took. Pure.

    `way` is how to call it next; once `settled`, it stays.
    """

    def __init__(self) -> None:
        self.way = BESIDE
        self.settled = False
        self._shapes: Any = None
        self._seconds: dict[str, list[float]] = {BESIDE: [], WITHIN: []}
        self._prepared = False

    def took(self, shapes: Any, seconds: float) -> None:
        """A call with arguments of these shapes took so long. Only calls with the same ones are compared."""
        if not self._prepared:
            self._prepared = True  # the first call does what is done once
            self._shapes = self._shapes or shapes
            return
        if shapes != self._shapes:
            return
        mine = self._seconds[self.way]
        mine.append(seconds)
        if len(mine) < TRIES:
            return
        if self.way == BESIDE and min(mine) < LONG:
            self.way, self._prepared = WITHIN, False
            return
        if self.way == WITHIN and min(self._seconds[BESIDE]) < min(mine):
            self.way = BESIDE
        self.settled = True


class CompiledCall:
    """A tf.function of one signature, called with tensors or NumPy arrays in the quicker of two ways.

    A call through TensorFlow's Python checks and sorts its arguments, and hands the function's operations
    to threads, which do those side by side that don't wait for each other. For a small model both take
    longer than the step. Called by the operation that it ends in, the function takes its tensors at once, and
    this thread does one operation after the other; but variables must be on one device, and XLA
    (jit_compile) is left out. The results are the same bits.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._concrete: Any = None
        self._quicker = QuickerWay()

    def __call__(self, *tensors: Any) -> Any:
        if self._concrete is None:
            self._trace()
        if self._quicker.settled:
            return self._call(tensors)
        started = time.perf_counter()
        outputs = self._call(tensors)
        self._quicker.took([tensor.shape for tensor in tensors], time.perf_counter() - started)
        return outputs

    def _call(self, tensors: Any) -> Any:
        if self._quicker.way == BESIDE:
            return self._concrete(*tensors)
        outputs = tf.raw_ops.StatefulPartitionedCall(
            args=[*tensors, *self._captured], Tout=self._dtypes, f=self._concrete
        )
        return self._pack(outputs)

    def _trace(self) -> None:
        self._concrete = self._function.get_concrete_function()
        self._captured = self._concrete.captured_inputs
        spread = len({tensor.device for tensor in self._captured}) > 1
        if spread or "_XlaMustCompile" in self._concrete.function_def.attr:
            self._quicker.settled = True
        elif _one_operation_at_a_time():
            self._quicker.way, self._quicker.settled = WITHIN, True
        self._dtypes = [tensor.dtype for tensor in self._concrete.outputs]
        self._pack = _packing(self._concrete.structured_outputs, len(self._dtypes))


def _one_operation_at_a_time() -> bool:
    """Whether TensorFlow has one thread, or one core, for operations that could be done side by side."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    threads = threads or int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    return threads == 1 or len(os.sched_getaffinity(0)) == 1


def _packing(structure: Any, count: int) -> Callable[[Any], Any]:
    """What puts `count` outputs into `structure`. Lists and dicts of tensors, as most are, are spared
    the walk through it."""
    places = tf.nest.pack_sequence_as(structure, list(range(count)))
    if type(places) is list and places == list(range(count)):
        return list
    if type(places) is dict and all(type(place) is int for place in places.values()):
        return lambda outputs: {name: outputs[place] for name, place in places.items()}
    return lambda outputs: tf.nest.pack_sequence_as(structure, outputs)
