"""A step of a custom loop trains or observes, and returns the outputs of each part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import insitu.exchange
from insitu.train.custom_loop.steps import (
    ExchangeStep,
    RestorePlacementStep,
    SingleFunctionStep,
    TrainOrObserveStep,
)
from insitu.train.elastic import CUSTOM_LOOP
from insitu.train.replica import ShardBatch

PARTS = [ShardBatch(0, 2, "a"), ShardBatch(1, 0, None)]


class Replica:
    """A replica whose step counts rows: (rows of the shard, 10 for each call) is its record."""

    floats_size, floats_dtype, train_record_size = 0, np.dtype("float32"), 2

    def __init__(self) -> None:
        self.outputs: dict[int, list[Any]] = {9: ["of the step before"]}
        self.applied: list[Any] = []

    def gradient(self, shard: int, data: Any, floats: Any, record: Any) -> None:
        record[:] = len(data), 10
        self.outputs[shard] = [data]

    def apply(self, floats: Any, records: Any) -> None:
        self.applied.append(records.tolist())


def step_model(*, groups: int = 0, changes: bool = True) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(groups=[None] * groups), changes_anything=changes)


def test_a_step_that_trains_is_done_at_its_position() -> None:
    replica: Any = Replica()
    trained = []

    def train(position: Any, parts: Any, report: Any) -> None:
        report("gradient")
        trained.append((position, parts))
        replica.outputs[0] = ["loss"]

    step: Any = SimpleNamespace(train=train)
    assert TrainOrObserveStep(replica, step).run(PARTS) == [["loss"], None]
    assert trained == [(CUSTOM_LOOP, PARTS)]


def test_how_a_step_observes_is_the_strategys_matter() -> None:
    with pytest.raises(NotImplementedError):
        TrainOrObserveStep(Replica(), None).run(PARTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [True, False])
def test_a_step_without_training_adds_up_what_all_shards_moved(changes: bool) -> None:
    replica: Any = Replica()
    with insitu.exchange.join(0, ["127.0.0.1:1"], shards=[0, 1], num_shards=2) as group:
        membership: Any = SimpleNamespace(
            group=lambda: group, context=SimpleNamespace(shards=(0, 1)), lockstep=None
        )
        step = ExchangeStep(step_model(changes=changes), replica, membership)
        assert step.run([ShardBatch(0, 2, "ab"), ShardBatch(1, 0, None)]) == [["ab"], None]
        assert step.run([ShardBatch(0, 0, None), ShardBatch(1, 3, "abc")]) == [None, ["abc"]]
    expected = [[[2.0, 10.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 10.0]]]
    assert replica.applied == (expected if changes else [])


def test_one_function_for_all_devices_reads_assigned_variables_first() -> None:
    calls: list[Any] = []

    class Devices:
        outputs: dict[int, list[Any]] = {5: ["old"]}  # noqa: RUF012

        def refresh(self, *, force: bool) -> None:
            calls.append(("refresh", force))

        def train(self, parts: Any) -> None:
            calls.append(("train", dict(self.outputs)))
            self.outputs[1] = ["new"]

    devices: Any = Devices()
    assert SingleFunctionStep(devices).run(PARTS) == [None, ["new"]]
    assert calls == [("refresh", False), ("train", {})]


def test_variables_go_back_to_their_devices_behind_a_step() -> None:
    order: list[str] = []
    inner: Any = SimpleNamespace(run=lambda parts: order.append("run") or [["y"]])
    assert RestorePlacementStep(inner, lambda: order.append("restore")).run(PARTS) == [["y"]]
    assert order == ["run", "restore"]
