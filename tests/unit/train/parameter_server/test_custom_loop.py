"""A custom loop on servers: whose rows count, and what a step without training moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import insitu.exchange
from insitu.base.errors import TrainingError
from insitu.train.parameter_server.step import ServerAggregation, ServerLoopStep, optimizer_of
from insitu.train.replica import ShardBatch


def test_each_replica_is_a_step_of_its_own_unless_servers_wait_for_all() -> None:
    alone = ServerAggregation(None)
    assert alone.replicas == 1 and alone.count_step_rows([3, 0]) == ([3, 0], 1)
    alone.synchronize([object()])  # the servers have the values
    with insitu.exchange.join(0, ["127.0.0.1:1"], shards=[0, 1], num_shards=2) as group:
        members: Any = SimpleNamespace(num_shards=2, group=lambda: group)
        summed = ServerAggregation(members)
        assert summed.replicas == 2 and summed.count_step_rows([3, 0]) == ([3, 3], 1)


class Replica:
    floats_size, floats_dtype, train_record_size = 3, np.dtype("float32"), 2

    def __init__(self) -> None:
        self.outputs: dict[int, list[Any]] = {}
        self.applied: list[Any] = []

    def gradient(self, shard: int, data: Any, floats: Any, record: Any) -> None:
        assert floats.shape == (3,)
        record[:] = len(data), 1
        self.outputs[shard] = [data]

    def apply(self, floats: Any, records: Any) -> None:
        self.applied.append(records.tolist())


def test_a_step_without_training_moves_the_workers_own_metrics() -> None:
    replica: Any = Replica()
    step = ServerLoopStep(replica, None, 2)
    assert step.run([ShardBatch(0, 2, "ab"), ShardBatch(1, 0, None)]) == [["ab"], None]
    assert replica.applied == [[[2.0, 1.0], [0.0, 0.0]]]
    assert step.run([ShardBatch(0, 0, None), ShardBatch(1, 0, None)]) == [None, None]
    assert len(replica.applied) == 1  # nothing to apply


@pytest.mark.parametrize("count", [0, 2])
def test_servers_hold_one_optimizer(count: int) -> None:
    def model(groups: int) -> Any:
        return SimpleNamespace(optimizer=SimpleNamespace(groups=[("sgd", [])] * groups))

    assert optimizer_of(model(1)) == "sgd"
    with pytest.raises(TrainingError, match=f"a step with {count}. Use MultiWorkerMirroredStrategy"):
        optimizer_of(model(count))
