"""The two-phase step: gradients, the exchange, the update, in that order and once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import insitu.exchange
from insitu.base.errors import InputError, TrainingError
from insitu.exchange import Group
from insitu.train.elastic.position import TEST, TRAIN, LoopPosition
from insitu.train.fit.two_phase import TwoPhaseStep
from insitu.train.replica import ShardBatch

POSITION = LoopPosition(0, TRAIN, 1, epoch=1, step=2)


class SumReplica:
    """A replica of one weight, whose gradient of a shard is the mean of its rows."""

    floats_size, floats_dtype = 1, np.dtype(np.float32)
    train_record_size, test_record_size, seeds_size, plan_number = 2, 1, 0, 0

    def __init__(self) -> None:
        self.applied: list[tuple[float, Any]] = []

    def run_with_seeds_of(self, shard: int, run: Callable[[], Any]) -> Any:
        return run(), np.empty(0)

    def needs_totals(self, *, training: bool) -> bool:
        return False

    def find_out(self, *, training: bool) -> None:
        """Find out nothing."""

    def gradient(self, shard: int, data: Any, floats: Any, record: Any) -> None:
        floats[:] = np.mean(data)
        record[:] = (len(data), shard)

    def evaluate(self, shard: int, data: Any, record: Any) -> None:
        record[:] = np.sum(data)

    def apply(self, mean: Any, records: Any) -> Any:
        self.applied.append((float(mean[0]), records.tolist()))
        return {"loss": float(mean[0])}

    def merge(self, records: Any) -> Any:
        return {"sum": float(records.sum())}

    def predict(self, data: Any) -> Any:
        return data * 2


class OneGroup:
    """Stands for the lockstep of tasks of which none is lost."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.positions: list[LoopPosition] = []

    def run_unit(self, position: LoopPosition, work: Callable[[Group], Any]) -> Any:
        self.positions.append(position)
        return self.group.all_gather(work(self.group))


@pytest.fixture
def lockstep() -> Any:
    with insitu.exchange.join(0, ["127.0.0.1:1"], shards=(0, 1), num_shards=2) as group:
        yield OneGroup(group)


@pytest.fixture
def replica() -> Any:
    return SumReplica()


def part(shard: int, *rows: float) -> ShardBatch:
    return ShardBatch(shard, len(rows), np.array(rows, np.float32)[:, None] if rows else None)


def test_a_step_updates_by_the_mean_over_rows(lockstep: Any, replica: Any) -> None:
    step, places = TwoPhaseStep(replica, lockstep), []
    logs = step.train(POSITION, [part(0, 1, 2, 3), part(1, 10)], places.append)
    assert logs == {"loss": 4.0}
    assert replica.applied == [(4.0, [[3, 0], [1, 1]])]
    assert places == ["gradient", "exchange", "update"]
    assert lockstep.positions == [POSITION]


def test_a_step_on_different_data_changes_nothing(lockstep: Any, replica: Any) -> None:
    step = TwoPhaseStep(replica, lockstep)
    row = np.ones((1, 1), np.float32)
    parts = [ShardBatch(shard, 1, row, fingerprint=5 + shard) for shard in (0, 1)]
    example = np.zeros((1, 1), np.float32)
    for call in (
        lambda: step.train(POSITION, parts, lambda place: None),
        lambda: step.test(POSITION, parts),
        lambda: step.predict(POSITION, parts, example),
    ):
        with pytest.raises(InputError, match=r"same data.* epoch 1 step 2.*process of shard 1"):
            call()
    assert replica.applied == []


def test_a_shard_without_rows_counts_nothing(lockstep: Any, replica: Any) -> None:
    step = TwoPhaseStep(replica, lockstep)
    step.train(POSITION, [part(0, 1, 3), part(1, 10)], lambda place: None)
    step.train(POSITION, [part(0), part(1, 6)], lambda place: None)
    assert replica.applied[-1] == (6.0, [[0, 0], [1, 1]])


def test_a_step_without_rows_changes_nothing(lockstep: Any, replica: Any) -> None:
    with pytest.raises(TrainingError, match="at least one row"):
        TwoPhaseStep(replica, lockstep).train(POSITION, [part(0), part(1)], lambda place: None)
    assert replica.applied == []


def test_the_buffers_are_kept_for_a_generation_of_the_group(lockstep: Any, replica: Any) -> None:
    step, parts = TwoPhaseStep(replica, lockstep), [part(0, 1), part(1, 2)]
    step.train(POSITION, parts, lambda place: None)
    floats = step._floats
    step.train(POSITION, parts, lambda place: None)
    assert step._floats is floats
    step._generation -= 1  # as of a group that has formed anew
    step.train(POSITION, parts, lambda place: None)
    assert step._floats is not floats


def test_tests_and_predictions_are_units_too(lockstep: Any, replica: Any) -> None:
    step = TwoPhaseStep(replica, lockstep)
    position = LoopPosition(0, TEST, 1, test=3)
    assert step.test(position, [part(0, 1, 2), part(1, 4)]) == {"sum": 7.0}
    example = np.zeros((1, 1), np.float32)
    outputs = step.predict(position, [part(0, 1, 2), part(1)], example)
    assert outputs.tolist() == [[2], [4]]
    assert lockstep.positions == [position, position]


class DrawingReplica(SumReplica):
    """Its predictions draw random numbers, which moves its seed generator."""

    seeds_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.seeds = np.array([7.0, 0.0])
        self.ran: list[int] = []

    def run_with_seeds_of(self, shard: int, run: Callable[[], Any]) -> Any:
        self.ran.append(shard)
        return run(), self.seeds + np.array([0, 5])

    def assign_seeds(self, values: Any) -> None:
        self.seeds = values


def test_seeds_move_as_on_the_first_shard_with_rows(lockstep: Any) -> None:
    replica: Any = DrawingReplica()
    step = TwoPhaseStep(replica, lockstep)
    example = step.example_output(np.ones((1, 1), np.float32))
    assert replica.seeds.tolist() == [7, 0]
    for parts in ([part(0), part(1, 3)], [part(0, 1), part(1, 2)]):
        step.predict(POSITION, parts, example)
    assert replica.seeds.tolist() == [7, 10] and replica.ran == [0, 1, 0, 1]


def test_tasks_that_plan_otherwise_are_refused(lockstep: Any, replica: Any) -> None:
    gather = lockstep.group.all_gather

    def with_another_plan(row: Any) -> Any:
        rows = gather(row)
        rows[1, -2] += 1
        return rows

    lockstep.group = SimpleNamespace(all_gather=with_another_plan, shards=(0, 1))
    with pytest.raises(TrainingError, match="another way in shard 1 than in shard 0"):
        TwoPhaseStep(replica, lockstep).test(POSITION, [part(0, 1), part(1, 2)])
