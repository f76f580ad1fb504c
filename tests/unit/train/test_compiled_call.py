"""A function is called by its operation, and means the same."""

from __future__ import annotations

import pytest
import tensorflow as tf

from insitu.train.backends.tensorflow import CompiledCall


@pytest.mark.parametrize("jit", [None, True])
def test_the_short_way_runs_what_was_compiled(jit: bool | None):
    """XLA draws other random numbers than TensorFlow, so they tell which of both has run."""

    def draw(seed):
        return [tf.random.stateless_uniform((3,), seed)]

    signature = [tf.TensorSpec((2,), tf.int32)]
    compiled = tf.function(draw, input_signature=signature, jit_compile=jit)
    plain = tf.function(draw, input_signature=signature)
    seed = tf.constant([1, 2])
    (drawn,) = CompiledCall(compiled)(seed)
    assert drawn.numpy().tolist() == compiled(seed)[0].numpy().tolist()
    assert (drawn.numpy().tolist() == plain(seed)[0].numpy().tolist()) == (jit is None)
