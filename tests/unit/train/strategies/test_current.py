"""The strategy that a script is in."""

from __future__ import annotations

import numpy as np

import insitu
from insitu.train import OneDeviceStrategy, get_strategy


def test_the_innermost_scope_is_the_current_strategy(strategy_over) -> None:
    outside, strategy = get_strategy(), strategy_over(2)
    assert isinstance(outside, OneDeviceStrategy) and get_strategy() is outside
    with strategy.scope():
        assert get_strategy() is strategy and insitu.in_cross_replica_context()
        found = strategy.run(lambda x: x * insitu.get_strategy().num_replicas_in_sync, (np.float32(1),))
    assert [float(value) for value in found.values] == [2, 2]
    assert get_strategy() is outside and not insitu.has_strategy()


def test_values_are_reduced_by_names_of_tensorflow_and_of_insitu(strategy_over) -> None:
    strategy = strategy_over(2)
    values = strategy.run(lambda x: x, (np.float32(3),))
    assert float(strategy.reduce(insitu.ReduceOp.SUM, values)) == 6
    assert float(strategy.reduce(insitu.ReduceOp.MEAN, values, axis=None)) == 3
