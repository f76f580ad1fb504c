"""A function is called in the chooser of two modes, and means the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from insitu.train.backends.tensorflow import calls
from insitu.train.backends.tensorflow.calls import (
    PARALLEL,
    SEQUENTIAL,
    SLOW_CALL_SECONDS,
    TIMED_CALLS,
    CallModeChooser,
    CompiledCall,
    compile_call,
    compile_function,
)

FULL, LAST = [(64, 8)], [(3, 8)]


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(calls, "_runs_sequentially", lambda: False)


def measure_calls(
    chooser: CallModeChooser, seconds: dict[str, float], calls: int = 2 * (TIMED_CALLS + 1)
) -> list[str]:
    """Which mode each call went, until `chooser` has chosen or `calls` are done."""
    modes = []
    for _ in range(calls):
        if chooser.chosen:
            break
        modes.append(chooser.mode)
        chooser.add_duration(FULL, seconds[chooser.mode])
    return modes


@pytest.mark.parametrize(
    ("parallel", "sequential", "chosen"),
    [(3e-4, 1e-4, SEQUENTIAL), (5e-3, 8e-3, PARALLEL), (5e-3, 5e-3, SEQUENTIAL)],
)
def test_the_quicker_way_stays(parallel: float, sequential: float, chosen: str):
    chooser = CallModeChooser()
    modes = measure_calls(chooser, {PARALLEL: parallel, SEQUENTIAL: sequential})
    assert modes == [PARALLEL] * (TIMED_CALLS + 1) + [SEQUENTIAL] * (TIMED_CALLS + 1)
    assert chooser.chosen
    assert chooser.mode == chosen


def test_a_long_function_is_not_prepared_for_the_other_way():
    chooser = CallModeChooser()
    assert measure_calls(chooser, {PARALLEL: SLOW_CALL_SECONDS}) == [PARALLEL] * (TIMED_CALLS + 1)
    assert chooser.chosen


def test_the_first_call_of_each_way_does_not_count():
    chooser = CallModeChooser()
    chooser.add_duration(FULL, 60.0)
    for _ in range(TIMED_CALLS):
        chooser.add_duration(FULL, 2e-4)
    assert chooser.mode == SEQUENTIAL
    chooser.add_duration(FULL, 60.0)
    for _ in range(TIMED_CALLS):
        chooser.add_duration(FULL, 1e-4)
    assert (chooser.chosen, chooser.mode) == (True, SEQUENTIAL)


def test_batches_of_another_size_do_not_count():
    chooser = CallModeChooser()
    chooser.add_duration(FULL, 1.0)
    for _ in range(2 * TIMED_CALLS):
        chooser.add_duration(LAST, 1e-6)
    assert (chooser.chosen, chooser.mode) == (False, PARALLEL)
    assert measure_calls(chooser, {PARALLEL: 2 * SLOW_CALL_SECONDS}) == [PARALLEL] * TIMED_CALLS
    assert chooser.chosen


@pytest.mark.usefixtures("many_cores")
def test_both_ways_give_the_same_bits():
    kernel = tf.Variable(np.random.default_rng(0).random((3, 3, 4, 8), dtype=np.float32))

    def gradient(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.softmax(tf.nn.conv2d(images, kernel, 1, "SAME")) ** 2)
        return {"loss": loss, "gradient": tape.gradient(loss, kernel)}

    call = CompiledCall(tf.function(gradient, input_signature=[tf.TensorSpec((None, 9, 9, 4))]))
    images = np.random.default_rng(1).random((16, 9, 9, 4), dtype=np.float32)
    seen = {}
    for mode in (PARALLEL, SEQUENTIAL):
        call._chooser.mode, call._chooser.chosen = mode, True
        outputs = call(images)
        if mode == PARALLEL:
            # Tracing, in the first call, may have chosen otherwise.
            assert call._chooser.mode == PARALLEL
        seen[mode] = {name: tensor.numpy().tobytes() for name, tensor in outputs.items()}
    assert seen[PARALLEL] == seen[SEQUENTIAL]


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("jit", [None, True])
def test_the_short_way_runs_what_was_compiled(jit: bool | None):
    """XLA draws other random numbers than TensorFlow, so they tell which of both has run."""

    def draw(seed):
        return [tf.random.stateless_uniform((3,), seed)]

    signature = [tf.TensorSpec((2,), tf.int32)]
    compiled = tf.function(draw, input_signature=signature, jit_compile=jit)
    plain = tf.function(draw, input_signature=signature)
    seed = tf.constant([1, 2])
    call = CompiledCall(compiled)
    wanted, other = compiled(seed)[0].numpy().tolist(), plain(seed)[0].numpy().tolist()
    assert (wanted == other) == (jit is None)
    for _ in range(2 * (TIMED_CALLS + 1)):
        (drawn,) = call(seed)
        assert drawn.numpy().tolist() == wanted
    assert call._chooser.chosen


def test_one_core_does_one_operation_after_the_other(monkeypatch):
    monkeypatch.setattr(calls.os, "sched_getaffinity", lambda pid: {3})
    call = CompiledCall(tf.function(lambda x: [x + 1], input_signature=[tf.TensorSpec((2,))]))
    call(np.zeros(2, np.float32))
    assert (call._chooser.chosen, call._chooser.mode) == (True, SEQUENTIAL)


@pytest.mark.parametrize("sequential", [True, False])
def test_other_sizes_are_left_open_once_they_come(monkeypatch, sequential: bool):
    monkeypatch.setattr(calls, "_runs_sequentially", lambda: sequential)
    traced = []

    def mean(x, y):
        traced.append((tuple(x.shape), tuple(y.shape)))
        return [tf.reduce_mean(x) + y[0]]

    signature = [tf.TensorSpec((None, 4, 2)), tf.TensorSpec((None,))]
    call = compile_call(mean, signature, jit_compile=None)
    for length in (4, 6, 5, 4):
        (result,) = call(tf.reshape(tf.range(length * 2.0), (1, length, 2)), tf.ones(1))
        assert float(result) == length - 0.5 + 1
    assert traced == [((None, 4, 2), (None,)), ((None, None, 2), (None,))]


def test_another_number_of_dimensions_is_another_function():
    call = compile_call(lambda x: [tf.reduce_mean(x)], [tf.TensorSpec((None,))], jit_compile=None)
    for shape in [(3,), (3, 1), (3,)]:
        assert float(call(tf.ones(shape))[0]) == 1


def test_numbers_of_rows_and_other_arguments_need_no_other_function():
    made: list[object] = []

    def compile_for(specs: list[tf.TensorSpec]) -> object:
        made.append(specs)
        return lambda *tensors: tensors

    call = calls.RelaxingCall(compile_for, [tf.TensorSpec(()), tf.TensorSpec((None, 2))])
    for rows in (1, 3):
        call(tf.constant(0.0), tf.ones((rows, 2)))
    assert len(made) == 1


def test_functions_of_the_same_lines_are_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        polymorphic_function.logging, "warning", lambda message, *args: warnings.append(message)
    )
    for make in (compile_function, tf.function):
        assert not warnings
        for size in range(1, 12):
            make(lambda x: x + 1)(tf.zeros(size))
    assert "retracing" in warnings[0]  # TensorFlow's own still does
