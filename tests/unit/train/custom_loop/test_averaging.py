"""Losses that weigh each row of the global batch the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from insitu.base.errors import TrainingError


def test_average_loss_weighs_rows_and_a_regularization_loss_counts_once(strategy_over):
    strategy = strategy_over(2)
    data = tf.data.Dataset.from_tensor_slices(np.arange(5, dtype="float32")).batch(5)

    def step(x: Any) -> Any:
        return (
            strategy.compute_average_loss(x, sample_weight=x * 0 + 2),
            strategy.compute_average_loss(x, global_batch_size=10),
            strategy.scale_regularization_loss(3.0),
        )

    for x in strategy.distribute_dataset(data):
        result = strategy.reduce("sum", strategy.run(step, (x,)))
    assert result == (4.0, 1.0, 3.0)
    assert strategy.compute_average_loss(np.ones(4, "float32"), global_batch_size=8) == 0.5
    assert strategy_over(1).compute_average_loss(np.ones(4, "float32")) == 1
    with pytest.raises(TrainingError, match=r"Outside strategy\.run"):
        strategy.compute_average_loss(np.ones(4, "float32"))
    with pytest.raises(TrainingError, match="reduction='none'"):
        strategy.compute_average_loss(np.float32(1), global_batch_size=8)
    with pytest.raises(TrainingError, match="at least 1"):
        strategy.compute_average_loss(np.ones(4, "float32"), global_batch_size=0)
