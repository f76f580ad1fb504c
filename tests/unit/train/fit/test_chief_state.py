"""What the chief's callbacks know reaches all tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from models import same_bits, weights

from insitu.train.fit import chief_state

BOTH = ("worker:0", "worker:1")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was broadcast: the tasks come one after the other, the sender first."""
    values: list[Any] = []

    def broadcast(group: Any, source: int, value: Any) -> Any:
        if group.rank == source:
            values.append(value)
        else:
            assert value is None
        return values[-1]

    monkeypatch.setattr(chief_state, "broadcast_value", broadcast)
    monkeypatch.setattr(chief_state, "barrier_token", lambda group: np.zeros(1))
    return values


def member(rank: int, *, tasks: tuple[str, ...] = BOTH, job: Any = "a-job", chief: int | None = 0) -> Any:
    group = SimpleNamespace(rank=rank)
    lockstep = SimpleNamespace(run_unit_until_done=lambda position, work: work(group))
    context = SimpleNamespace(workers=tasks, job=job)
    return SimpleNamespace(lockstep=lockstep, context=context, chief_rank=lambda group: chief)


def make_model(value: float) -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    for variable in (*model.trainable_variables, *model.optimizer.variables):
        variable.assign(keras.ops.full(variable.shape, value, variable.dtype))
    return model


def test_all_take_the_state_and_the_epoch_that_the_chief_restored(sent: list[Any]) -> None:
    chief, other = make_model(3), make_model(0)
    chief._initial_epoch = 2
    for rank, model in ((1, chief), (0, other)):
        chief_state.send_restored(member(rank, chief=1), None, model)  # type: ignore[arg-type]
    assert same_bits(weights(other), weights(chief))
    assert [float(np.max(v)) for v in other.optimizer.variables] == [3] * len(other.optimizer.variables)
    assert (other._initial_epoch, len(sent)) == (2, 1)


def test_where_nothing_was_restored_a_fit_begins_at_its_beginning(sent: list[Any]) -> None:
    chief, other = make_model(3), make_model(0)
    for rank, model in ((0, chief), (1, other)):
        chief_state.send_restored(member(rank), None, model)  # type: ignore[arg-type]
    assert other._initial_epoch is None


def test_one_task_sends_nothing(sent: list[Any]) -> None:
    chief_state.send_restored(member(0, tasks=()), None, make_model(1))  # type: ignore[arg-type]
    assert sent == []
