"""Sums, means and gathers over replicas."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from torch_tree import use_torch_tree

from insitu.base.errors import TrainingError
from insitu.train.custom_loop.per_replica import PerReplica


def test_a_large_number_stays_itself_where_the_backend_has_no_such_dtype(strategy_over, monkeypatch):
    strategy, large = strategy_over(1), np.int64(3_000_000_000)
    assert tf.is_tensor(strategy.reduce("sum", large))
    # As JAX does without 64 bits.
    monkeypatch.setattr("keras.ops.convert_to_tensor", lambda value: np.asarray(value).astype("int32"))
    found = strategy.reduce("sum", large)
    assert (int(found), found.dtype) == (3_000_000_000, np.int64)


def test_reduce_and_gather(strategy_over):
    strategy = strategy_over(1)
    assert strategy.num_replicas_in_sync == 1
    assert strategy.run(lambda a, b: a + b, (1, 2)) == 3
    assert strategy.reduce("sum", np.float32(3)) == 3
    np.testing.assert_array_equal(
        strategy.reduce("mean", np.array([[1, 2], [3, 6]]), axis=0), np.array([2.0, 4.0])
    )
    gathered = strategy.gather({"a": np.arange(6).reshape(2, 3)}, axis=1)
    np.testing.assert_array_equal(gathered["a"], np.arange(6).reshape(2, 3))
    uneven = PerReplica((np.array([1, 2, 3]), None, np.array([8])))
    three = strategy_over(3)
    assert three.reduce("mean", uneven, axis=0) == 3.5
    assert three.reduce("sum", PerReplica((1, None, 2))) == 3
    assert np.asarray(three.gather(uneven)).tolist() == [1, 2, 3, 8]
    for wrong, message in [
        (lambda: strategy.reduce("max", 1), "'sum' or 'mean'"),
        (lambda: three.reduce("sum", PerReplica((None,) * 3)), "Received: None from each"),
        (lambda: three.reduce("sum", uneven), "the same shape"),
        (lambda: three.reduce("sum", []), "at least one value"),
        (lambda: three.gather(PerReplica((1, 2, 3))), "a scalar"),
        (lambda: strategy.reduce("sum", uneven), "which has 1 here"),
    ]:
        with pytest.raises(TrainingError, match=message):
            wrong()


@pytest.mark.torch
def test_dictionaries_keep_the_order_of_their_keys(strategy_over, monkeypatch):
    """PyTorch's tree gives them sorted."""
    strategy = strategy_over(1)
    values = {"loss": np.array([2.0]), "accuracy": np.array([0.5])}
    use_torch_tree(monkeypatch)
    for combined in (strategy.reduce("sum", values), strategy.gather(values)):
        assert {name: float(value[0]) for name, value in combined.items()} == {"loss": 2.0, "accuracy": 0.5}
        assert list(combined) == ["loss", "accuracy"]
