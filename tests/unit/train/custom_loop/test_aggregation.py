"""Gradients of a custom loop are summed over the replicas of all tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
from exchange_ranks import in_threads

import insitu.exchange
from insitu.train.custom_loop.reduction import ExchangeAggregation

SHARDS = ((0, 1), (2,))


def in_group(work: Any) -> list[Any]:
    """The results of `work(aggregation, group)` in two tasks, which host two shards and one."""

    def task(index: int, addresses: list[str]) -> Any:
        with insitu.exchange.join(
            index, addresses, shards=SHARDS[index], num_shards=3, timeout=40.0
        ) as group:
            membership: Any = SimpleNamespace(num_shards=3, group=lambda: group)
            return work(ExchangeAggregation(membership), group)

    return in_threads(2, task)


def test_rows_of_a_step_are_those_of_all_tasks() -> None:
    rows = [[3, 0], [4]]
    counted = in_group(lambda aggregation, group: aggregation.count_step_rows(rows[group.rank]))
    assert counted == [([7, 7], 2), ([7], 2)]


def test_a_task_that_is_alone_asks_nobody() -> None:
    with insitu.exchange.join(0, ["127.0.0.1:1"], shards=[0, 1], num_shards=2) as group:
        membership: Any = SimpleNamespace(num_shards=2, group=lambda: group)
        aggregation = ExchangeAggregation(membership)
        before = group.last_completed
        assert aggregation.replicas == 2 and aggregation.count_step_rows([3, 2]) == ([5, 5], 2)
        assert group.last_completed == before


def test_variables_get_the_values_of_rank_0() -> None:
    variables = [[keras.Variable(np.full(2, rank, "float32"))] for rank in range(2)]
    in_group(lambda aggregation, group: aggregation.synchronize(variables[group.rank]))
    assert [v.numpy().tolist() for (v,) in variables] == [[0, 0], [0, 0]]
