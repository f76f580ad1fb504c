"""A function is called in the quicker of two ways, and means the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from insitu.train.replica import tensorflow_calls
from insitu.train.replica.tensorflow_calls import BESIDE, LONG, TRIES, WITHIN, CompiledCall, QuickerWay

FULL, LAST = [(64, 8)], [(3, 8)]


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr(tensorflow_calls, "_one_operation_at_a_time", lambda: False)


def settle(quicker: QuickerWay, seconds: dict[str, float], calls: int = 2 * (TRIES + 1)) -> list[str]:
    """Which way each call went, until `quicker` is settled or `calls` are done."""
    ways = []
    for _ in range(calls):
        if quicker.settled:
            break
        ways.append(quicker.way)
        quicker.took(FULL, seconds[quicker.way])
    return ways


@pytest.mark.parametrize(
    ("beside", "within", "chosen"),
    [(3e-4, 1e-4, WITHIN), (5e-3, 8e-3, BESIDE), (5e-3, 5e-3, WITHIN)],
)
def test_the_quicker_way_stays(beside: float, within: float, chosen: str):
    quicker = QuickerWay()
    ways = settle(quicker, {BESIDE: beside, WITHIN: within})
    assert ways == [BESIDE] * (TRIES + 1) + [WITHIN] * (TRIES + 1)
    assert quicker.settled
    assert quicker.way == chosen


def test_a_long_function_is_not_prepared_for_the_other_way():
    quicker = QuickerWay()
    assert settle(quicker, {BESIDE: LONG}) == [BESIDE] * (TRIES + 1)
    assert quicker.settled


def test_the_first_call_of_each_way_does_not_count():
    quicker = QuickerWay()
    quicker.took(FULL, 60.0)
    for _ in range(TRIES):
        quicker.took(FULL, 2e-4)
    assert quicker.way == WITHIN
    quicker.took(FULL, 60.0)
    for _ in range(TRIES):
        quicker.took(FULL, 1e-4)
    assert (quicker.settled, quicker.way) == (True, WITHIN)


def test_batches_of_another_size_do_not_count():
    quicker = QuickerWay()
    quicker.took(FULL, 1.0)
    for _ in range(2 * TRIES):
        quicker.took(LAST, 1e-6)
    assert (quicker.settled, quicker.way) == (False, BESIDE)
    assert settle(quicker, {BESIDE: 2 * LONG}) == [BESIDE] * TRIES
    assert quicker.settled


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
    for way in (BESIDE, WITHIN):
        call._quicker.way, call._quicker.settled = way, True
        outputs = call(images)
        if way == BESIDE:
            # Tracing, in the first call, may have settled it otherwise.
            assert call._quicker.way == BESIDE
        seen[way] = {name: tensor.numpy().tobytes() for name, tensor in outputs.items()}
    assert seen[BESIDE] == seen[WITHIN]


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
    for _ in range(2 * (TRIES + 1)):
        (drawn,) = call(seed)
        assert drawn.numpy().tolist() == wanted
    assert call._quicker.settled


def test_one_core_does_one_operation_after_the_other(monkeypatch):
    monkeypatch.setattr(tensorflow_calls.os, "sched_getaffinity", lambda pid: {3})
    call = CompiledCall(tf.function(lambda x: [x + 1], input_signature=[tf.TensorSpec((2,))]))
    call(np.zeros(2, np.float32))
    assert (call._quicker.settled, call._quicker.way) == (True, WITHIN)
