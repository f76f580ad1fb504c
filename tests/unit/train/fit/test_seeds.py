"""Unseeded shuffles are the same in each process of a job; a script's own seeds stay."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context

from insitu.train.fit.sources import seed_unseeded


def draw() -> list[int]:
    return [int(value) for value in tf.data.Dataset.range(20).shuffle(20)]


def test_only_what_has_no_seed_is_seeded():
    tf.random.set_seed(5)
    first = draw()
    tf.random.set_seed(5)
    seed_unseeded(9)
    assert draw() == first
    try:
        context.context()._seed = None
        seed_unseeded(9)
        second = draw()
        tf.random.set_seed(9)
        assert draw() == second != first
    finally:
        tf.random.set_seed(7)
