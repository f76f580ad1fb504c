"""A `tf.function` around `strategy.run`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from insitu.train.backends.tensorflow.tf_function import CalledInGraph

DATA = np.arange(12, dtype="float32")


def distributed(strategy: Any) -> Any:
    return strategy.distribute_dataset(tf.data.Dataset.from_tensor_slices(DATA).batch(5))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_function_around_a_step_runs_it_once_for_each_batch(strategy_over, shards) -> None:
    strategy = strategy_over(shards)

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("sum", strategy.run(lambda x: tf.reduce_sum(x), (batch,)))

    for _ in range(2):
        assert [float(step(batch)) for batch in distributed(strategy)] == [10, 35, 21]


def test_a_function_around_the_loop_of_an_epoch_sees_each_batch_of_each_epoch(strategy_over) -> None:
    strategy = strategy_over(2)
    dataset = distributed(strategy)

    @tf.function
    def epoch(batches: Any) -> Any:
        total = 0.0
        for batch in batches:
            total += strategy.reduce("sum", strategy.run(lambda x: tf.reduce_sum(x), (batch,)))
        return total

    @tf.function
    def nested(batches: Any) -> Any:
        return epoch(batches)

    assert [float(epoch(dataset)), float(nested(dataset))] == [66, 66]
    assert dataset.state_dict() == {"epoch": 2, "step": 0}


def test_a_function_over_an_iterator_takes_no_batch_that_it_does_not_use(strategy_over) -> None:
    strategy = strategy_over(2)
    iterator = iter(distributed(strategy))

    @tf.function
    def first_two() -> Any:
        total = 0.0
        for _ in tf.range(2):
            total += strategy.reduce("sum", strategy.run(lambda x: tf.reduce_sum(x), (next(iterator),)))
        return total

    assert float(first_two()) == 45
    assert float(strategy.reduce("sum", strategy.run(lambda x: tf.reduce_sum(x), (next(iterator),)))) == 21


def test_a_signature_may_name_the_elements(strategy_over) -> None:
    strategy = strategy_over(2)
    dataset = distributed(strategy)

    @tf.function(input_signature=[dataset.element_spec])
    def step(batch: Any) -> Any:
        return strategy.reduce("sum", strategy.run(lambda x: tf.reduce_sum(x), (batch,)))

    assert [float(step(batch)) for batch in dataset] == [10, 35, 21]


def test_other_functions_stay_graphs_and_keep_their_errors(strategy_over) -> None:
    strategy = strategy_over(1)
    seen = []

    @tf.function
    def plain(x: Any) -> Any:
        seen.append(tf.inside_function())
        return x + 1

    assert float(plain(tf.constant(1.0))) == 2 and seen == [True]

    @tf.function
    def wrong(x: Any) -> Any:
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        wrong(tf.constant(1.0))
    with pytest.raises(CalledInGraph, match=r"Dataset\.map"):
        tf.data.Dataset.range(2).map(lambda x: strategy.run(lambda y: y, (x,)))


def test_a_step_may_branch_and_loop_over_tensors(strategy_over) -> None:
    strategy = strategy_over(2)

    def step(x: Any) -> Any:
        total = tf.zeros(())
        for row in x:
            if row > 2:
                total += row
            else:
                total -= row
        while total < 1:
            total += 2.0
        return total

    (batch,) = strategy.distribute_dataset(tf.data.Dataset.from_tensors(np.arange(5, dtype="float32")))
    for run in (strategy.run, tf.function(strategy.run)):
        assert [float(value) for value in run(step, (batch,)).values] == [1.0, 5.0]
