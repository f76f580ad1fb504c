"""The scope of a strategy: which models belong to it, and which scopes may be open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

from insitu.base.errors import TrainingError
from insitu.train.elastic import SynchronousMembership
from insitu.train.strategies.base import Strategy


class Placing(Strategy):
    """Makes no step, but says when variables are to be placed."""

    def __init__(self, shards: int = 2) -> None:
        super().__init__(SynchronousMembership(in_shards(tuple(range(shards)), shards), "auto"))
        self.entered = 0

    @contextlib.contextmanager
    def placement(self) -> Iterator[None]:
        self.entered += 1
        yield


def compiled() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_scope_may_be_opened_again_but_not_in_another_strategys() -> None:
    strategy = Placing()
    with strategy.scope(), strategy.scope() as inner:
        assert inner is strategy and strategy.entered == 2
        with pytest.raises(TrainingError, match="Received: Placing inside Placing"), Placing().scope():
            pass
    with Placing().scope():
        pass


def test_a_scope_is_closed_after_an_error() -> None:
    with pytest.raises(KeyError), Placing().scope():
        raise KeyError
    with Placing().scope():
        pass


def test_a_model_is_trained_in_the_scope_that_it_was_compiled_in() -> None:
    strategy, other = Placing(), Placing()
    outside = compiled()
    with strategy.scope():
        mine = compiled()
        with pytest.raises(TrainingError, match="compiled outside"):
            outside.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    strategy.check_open(mine)
    with other.scope(), pytest.raises(TrainingError, match="in another strategy's scope, Placing"):
        strategy.check_open(mine)


def test_a_replica_has_the_values_of_its_shard() -> None:
    strategy = Placing(3)
    assert strategy.num_replicas_in_sync == 3
    assert strategy.local_results(7) == (7, 7, 7)
    assert strategy.evaluation_options(None)["shards"] == (0, 1, 2)


def test_what_a_strategy_leaves_open_it_says() -> None:
    strategy = Placing()
    for unmade in (
        lambda: strategy.make_step(None, None, first=True),
        lambda: strategy.make_loop_step(None, []),  # type: ignore[arg-type]
        strategy.loop_aggregation,
    ):
        with pytest.raises(NotImplementedError):
            unmade()
