"""Models that take batches of one size belong on one device."""

from __future__ import annotations

import keras
import pytest

from insitu.base.errors import TrainingError
from insitu.train.fit.step_executors import check_batch_shape, find_fixed_batch_size


def test_a_model_for_one_size_of_batch_is_refused_with_several_replicas():
    layers = keras.layers
    fixed = keras.Sequential([keras.Input(batch_shape=(8, 5, 3)), layers.SimpleRNN(2, stateful=True)])
    free = keras.Sequential([keras.Input((5, 3)), layers.SimpleRNN(2)])
    assert (find_fixed_batch_size(fixed), find_fixed_batch_size(free)) == (8, None)
    check_batch_shape(fixed, 1)
    check_batch_shape(free, 2)
    with pytest.raises(TrainingError, match=r"the stateful layer 'simple_rnn.*2 replicas"):
        check_batch_shape(fixed, 2)
    dense = keras.Sequential([keras.Input(batch_shape=(8, 3)), layers.Dense(2)])
    check_batch_shape(dense, 2)  # Keras holds nobody to the size of the batch
