"""What a synchronous strategy makes for one process: the fused step, or one over the exchange."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

from insitu.train.custom_loop import ExchangeAggregation
from insitu.train.elastic import SynchronousMembership
from insitu.train.fit import TwoPhaseStep
from insitu.train.replica import FusedStep
from insitu.train.strategies.synchronous import SynchronousStrategy

EXAMPLE = (np.ones((1, 3), "float32"), np.ones((1, 1), "float32"))


def over(shards: int) -> SynchronousStrategy:
    return SynchronousStrategy(context=in_shards(tuple(range(shards)), shards))


def model_of(strategy: SynchronousStrategy) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(("shards", "kind"), [(1, FusedStep), (2, TwoPhaseStep)])
def test_a_step_is_exchanged_where_there_are_several_shards(shards: int, kind: type) -> None:
    strategy = over(shards)
    assert type(strategy.make_step(model_of(strategy), EXAMPLE, first=True)) is kind
    assert strategy.num_replicas_in_sync == shards


def test_the_first_step_begins_with_the_state_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = over(2)
    model, sent = model_of(strategy), []
    monkeypatch.setattr(
        "insitu.train.strategies.synchronous.broadcast_state",
        lambda state, group, model: sent.append(group.size),
    )
    strategy.make_step(model, EXAMPLE, first=True)
    strategy.make_step(model, EXAMPLE, first=False)
    assert sent == [1]


def test_a_loop_sums_over_the_exchange() -> None:
    aggregation = over(2).loop_aggregation()
    assert isinstance(aggregation, ExchangeAggregation) and aggregation.replicas == 2


def test_what_its_tasks_do_they_do_in_lockstep() -> None:
    assert isinstance(over(1).membership, SynchronousMembership)
