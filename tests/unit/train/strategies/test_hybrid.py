"""What a hybrid strategy can't train, and what it keeps where."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.base.spec import TaskId
from insitu.train.elastic import TRAIN, LoopPosition

EXAMPLE = (np.ones((1, 3), "float32"), np.ones((1, 1), "float32"))


def test_a_model_without_a_table_is_refused() -> None:
    strategy = insitu.HybridStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(TrainingError, match=r"without an insitu.layers.Embedding. Use MultiWorkerMirrored"):
        strategy.make_step(model, EXAMPLE, first=True)


def test_a_custom_loop_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"Received: strategy.run under a HybridStrategy. Use fit"):
        insitu.HybridStrategy().loop_aggregation()


def test_a_job_needs_servers() -> None:
    here = dataclasses.replace(insitu.context(), job_id="j-1", task=TaskId("worker", 0), workers=("a:1",))
    with pytest.raises(TrainingError, match="A HybridStrategy keeps tables in ps tasks"):
        insitu.HybridStrategy(context=here)


def test_a_setting_that_can_not_be_is_refused_when_the_strategy_is_made() -> None:
    wrong: Any = "ignore"
    with pytest.raises(InputError, match="nan"):
        insitu.HybridStrategy(nan=wrong)


def test_shards_stay_with_their_task_and_what_replicas_hold_is_saved_by_them() -> None:
    strategy = insitu.HybridStrategy()
    assert not strategy.membership.shards_move
    assert strategy.save_elsewhere() is False
    strategy.end_fit(0, [], LoopPosition(0, TRAIN))
