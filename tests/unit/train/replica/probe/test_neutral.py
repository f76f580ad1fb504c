"""A probe sees no chance."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.train.replica.probe.neutral import without_chance


def test_random_numbers_are_their_means_and_dropout_keeps_all() -> None:
    x = np.ones((4, 3), "float32")
    drop, noise = keras.layers.Dropout(0.5, seed=1), keras.layers.GaussianNoise(1.0, seed=1)
    seed = drop.seed_generator.state.numpy().tolist()
    with without_chance() as chance:
        assert not chance.used
        assert np.array_equal(drop(x, training=True), x)
        assert np.array_equal(noise(x, training=True), x)
        assert np.array_equal(keras.random.uniform((2,), -1.0, 3.0), [1, 1])
        assert np.array_equal(keras.random.normal((2,), mean=2.0), [2, 2])
        assert keras.random.randint((2,), 0, 10).numpy().tolist() == [5, 5]
        assert keras.random.categorical(x, 2).shape == (4, 2)
        assert np.array_equal(keras.random.shuffle(x), x)
        assert np.array_equal(tf.random.normal((2,)), [0, 0])
        assert chance.used
    assert drop.seed_generator.state.numpy().tolist() == seed
    assert not np.array_equal(drop(x, training=True), x)


def test_generators_go_on_as_if_nothing_had_been() -> None:
    keras.utils.set_random_seed(3)
    expected = (random.random(), np.random.rand(), float(keras.random.normal(())))
    keras.utils.set_random_seed(3)
    with without_chance():
        random.random()
        np.random.rand()
        keras.random.normal(())
    assert (random.random(), np.random.rand(), float(keras.random.normal(()))) == expected


def test_batch_normalization_takes_no_statistics() -> None:
    layer = keras.layers.BatchNormalization()
    x = np.arange(6.0).reshape(3, 2).astype("float32")
    layer.build(x.shape)
    with without_chance():
        np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1.001), rtol=1e-5)
    assert layer.moving_mean.numpy().tolist() == [0, 0]
    layer(x, training=True)
    assert layer.moving_mean.numpy().any()


def test_all_is_put_back_after_an_error() -> None:
    call, normal = keras.layers.BatchNormalization.call, tf.random.normal
    with pytest.raises(KeyError), without_chance():
        raise KeyError
    assert keras.layers.BatchNormalization.call is call
    assert tf.random.normal is normal
