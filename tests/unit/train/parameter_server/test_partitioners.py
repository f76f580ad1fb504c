"""Partitioners cut as TensorFlow's do, and say what an answer must be."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import in_shards, same_bits, weights

from insitu.base.errors import InputError, TrainingError
from insitu.train import ParameterServerStrategy
from insitu.train.parameter_server import partitioners
from insitu.train.parameter_server.partitioners import count_parts

SHAPES = [(1,), (7,), (10, 3), (6, 1), (1024, 1024), (3, 5, 7), (0, 4)]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("FixedShardsPartitioner", {"num_shards": 4}),
        ("MinSizePartitioner", {}),
        ("MinSizePartitioner", {"min_shard_bytes": 12, "max_shards": 5}),
        ("MaxSizePartitioner", {"max_shard_bytes": 12}),
        ("MaxSizePartitioner", {"max_shard_bytes": 100, "max_shards": 3}),
    ],
)
def test_answers_are_those_of_tensorflow(name: str, arguments: dict[str, Any]) -> None:
    ours = getattr(partitioners, name)(**arguments)
    theirs = getattr(tf.distribute.experimental.partitioners, name)(**arguments)
    for shape in SHAPES:
        for dtype in ("float32", "float64", "bfloat16"):
            if name == "MaxSizePartitioner" and 0 in shape:
                assert ours(shape, dtype) == [1, 1]  # TensorFlow divides by zero
                continue
            expected = theirs(tf.TensorShape(shape), tf.as_dtype(dtype))
            assert ours(shape, dtype) == ours(tf.TensorShape(shape), tf.as_dtype(dtype)) == expected


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match=r"max_shards must be .*, at least 1\. Received: 0"):
        partitioners.MinSizePartitioner(max_shards=0)
    with pytest.raises(InputError, match=r"num_shards must be .* Received: 1\.5"):
        partitioners.FixedShardsPartitioner(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [[], None, [0, 1], [1, 2], [2]])
def test_an_answer_that_cuts_another_axis_is_refused(answer: Any) -> None:
    with pytest.raises(InputError, match=r"for the shape \(4, 3\)\. Return such as \[2, 1\]"):
        count_parts(lambda shape, dtype: answer, (4, 3), "float32")
    assert count_parts(lambda shape, dtype: answer, (), "float32") == 1


def trained(optimizer: Any, **options: Any) -> Any:
    context = in_shards((0,), 1)
    strategy = ParameterServerStrategy(mode="sync", context=context, **options)
    with strategy.scope():
        layers = [
            keras.Input((2,)),
            keras.layers.Dense(3, kernel_initializer="ones", bias_initializer="ones"),
        ]
        model = keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
    rows = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
    model.fit(rows, rows[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    model.pieces_ = [piece[:3] for piece in strategy._open_session()._client.stats()[0]["pieces"]]
    return model


def test_a_variable_lies_in_pieces_and_trains_to_the_same_bits() -> None:
    whole = trained(keras.optimizers.Adam(0.1))
    cut = trained(
        keras.optimizers.Adam(0.1), variable_partitioner=partitioners.FixedShardsPartitioner(num_shards=2)
    )
    rows = [(start, stop) for _, start, stop in cut.pieces_]
    assert rows == [(0, 1), (1, 2), (0, 2), (2, 3), (0, 2), (2, 3), (0, 1)]
    assert [(start, stop) for _, start, stop in whole.pieces_] == [(0, 2), (0, 3), (0, 3), (0, 1)]
    assert same_bits(weights(cut), weights(whole))


def test_tensorflows_own_partitioner_works_too() -> None:
    theirs = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=12, max_shards=2)
    cut = trained(keras.optimizers.SGD(0.1), variable_partitioner=theirs)
    assert [(start, stop) for _, start, stop in cut.pieces_] == [(0, 1), (1, 2), (0, 3), (0, 3), (0, 1)]


def test_an_optimizer_of_whole_variables_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"cut into 2 pieces, with Lamb"):
        trained(keras.optimizers.Lamb(0.1), variable_partitioner=partitioners.FixedShardsPartitioner(2))
