"""Where a script is: the strategy and the replica."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import TrainingError
from insitu.train.custom_loop import (
    find_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)


def test_outside_of_all_scopes_there_is_one_replica() -> None:
    context = get_replica_context()
    assert not has_strategy() and not in_cross_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.all_reduce("sum", 3) == 3


def test_a_scope_is_where_no_single_replica_runs(strategy_over) -> None:
    strategy = strategy_over(2)
    with strategy.scope():
        assert has_strategy() and in_cross_replica_context()
        assert find_strategy() is strategy and get_replica_context() is None


def test_a_step_knows_its_replica(strategy_over) -> None:
    strategy = strategy_over(3)

    def step(x: Any) -> Any:
        context = get_replica_context()
        assert has_strategy() and not in_cross_replica_context()
        assert context.strategy is strategy and context.num_replicas_in_sync == 3
        return context.replica_id_in_sync_group * 10 + keras.ops.cast(x[0], "int32")

    data = tf.data.Dataset.range(3).batch(3)
    (batch,) = strategy.distribute_dataset(data)
    assert [int(value) for value in strategy.run(step, (batch,)).values] == [0, 11, 22]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "merge_call"])
def test_replicas_cannot_meet_in_the_middle_of_a_step(strategy_over, name) -> None:
    strategy = strategy_over(2)
    with pytest.raises(TrainingError, match=rf"Received: {name}.*strategy\.reduce"):
        strategy.run(lambda x: getattr(get_replica_context(), name)("sum", x), (np.zeros(2, "float32"),))
