"""What the chief's callbacks know reaches all tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from models import same_bits, weights

from insitu.train.elastic.position import BEGIN, END, EPOCH, PREDICT, TEST, TRAIN, LoopPosition
from insitu.train.fit import callback_memory, chief_state
from insitu.train.fit.callback_memory import CallbackMemory
from insitu.train.fit.chief_state import ChiefMemory

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


class Counting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.large = np.zeros(0)


class Other(Counting):
    """A callback that doesn't hear of batches."""


class Task:
    """A task's callbacks, and what it has broadcast to all."""

    def __init__(self, rank: int) -> None:
        self.counting, self.other = Counting(), Other()
        self.saver = keras.callbacks.ModelCheckpoint("unused.keras")
        given = [self.counting, self.other, self.saver]
        self.memory = CallbackMemory(given, keras.callbacks.History(), rank == 0)
        self.chief = ChiefMemory(self.memory)
        self.group: Any = SimpleNamespace(rank=rank, size=2)
        self.hearing: list[Any] = [self.counting] if rank == 0 else []


class Tasks:
    """A chief and another task, one after the other in each unit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
        self.tasks = [Task(0), Task(1)]
        self.lists: list[list[int]] = []
        self.sent = sent

    @property
    def chief(self) -> Task:
        return self.tasks[0]

    @property
    def other(self) -> Task:
        return self.tasks[1]


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two tasks in threads, whose collectives meet."""
    import threading

    made = Tasks(monkeypatch, [])
    barrier = threading.Barrier(2, timeout=60)
    box: dict[Any, Any] = {}

    def broadcast(group: Any, source: int, value: Any) -> Any:
        if group.rank == source:
            box["value"] = value
            made.sent.append(value)
        else:
            assert value is None
        barrier.wait()
        found = box["value"]
        barrier.wait()
        return found

    def gather(group: Any, value: Any) -> Any:
        box[group.rank] = value
        barrier.wait()
        found = [box[0], box[1]]
        barrier.wait()
        return found

    monkeypatch.setattr(chief_state, "broadcast_value", broadcast)
    monkeypatch.setattr(chief_state, "all_gather_json", gather)
    errors: list[BaseException] = []

    def share(kind: Any, *, done: bool = True) -> list[Any]:
        """Do a unit, or begin it only; return what was broadcast."""
        made.sent.clear()

        def run(task: Task) -> None:
            try:
                position = LoopPosition(0, kind, 1)
                if task.chief.is_due(position):
                    task.chief.share(task.group, 0, position, task.hearing)
                if done:
                    task.chief.end_unit()
                    task.memory.release()
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=run, args=(task,)) for task in made.tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return list(made.sent)

    made.share = share  # type: ignore[attr-defined]
    return made


def names(sent: list[Any]) -> list[str]:
    return sorted(sent[0]["states"])


ALL = ["Counting 0", "History 0", "ModelCheckpoint 0", "Other 0"]


def test_only_what_may_have_changed_is_sent(tasks: Any) -> None:
    assert names(tasks.share(BEGIN)) == ALL
    assert names(tasks.share(TRAIN)) == ["Counting 0"]
    assert names(tasks.share(TEST)) == ["Counting 0"]
    assert names(tasks.share(PREDICT)) == ["Counting 0"]
    assert names(tasks.share(EPOCH)) == ALL
    for task in tasks.tasks:
        task.chief.all_due = True  # an epoch begins
    assert names(tasks.share(TRAIN, done=False)) == ALL
    assert names(tasks.share(TRAIN)) == ALL
    assert names(tasks.share(TRAIN)) == ["Counting 0"]
    tasks.chief.hearing = []
    assert names(tasks.share(END)) == ALL
    assert tasks.share(TRAIN) == []


def test_what_is_sent_in_a_unit_holds_once_that_is_done(tasks: Any) -> None:
    """Until then a chief that is lost is called again, behind the unit before."""
    tasks.share(BEGIN)
    tasks.chief.counting.count = 1
    tasks.share(TRAIN)
    tasks.chief.counting.count = 2
    tasks.share(TRAIN, done=False)
    assert tasks.other.memory.transfer()["of_chief"]["Counting 0"]["count"] == 1
    tasks.share(TRAIN)
    assert tasks.other.memory.transfer()["of_chief"]["Counting 0"]["count"] == 2
    assert tasks.other.counting.count == 0


def test_one_task_or_no_chief_sends_nothing(tasks: Any) -> None:
    alone = SimpleNamespace(rank=0, size=1)
    tasks.chief.chief.share(alone, 0, LoopPosition(0, BEGIN, 1), [])
    tasks.chief.chief.share(tasks.chief.group, None, LoopPosition(0, BEGIN, 1), [])
    assert tasks.sent == []


def test_what_is_large_is_sent_where_it_differs(tasks: Any) -> None:
    large = np.arange(callback_memory._SMALL_STATE, dtype="float32")
    for task in tasks.tasks:
        task.counting.large = task.other.large = large.copy()
    tasks.chief.saver.best = large
    (sent,) = tasks.share(BEGIN)
    assert set(sent["states"]["Counting 0"]) == set(sent["states"]["Other 0"]) == {"#hash"}
    assert sent["states"]["ModelCheckpoint 0"]["best"] is large, "the other task runs no writers"
    assert "Counting 0" not in tasks.other.memory.transfer()["of_chief"]

    tasks.chief.other.large = large + 1
    first, second = tasks.share(EPOCH)
    assert set(first["states"]["Other 0"]) == {"#hash"} and list(second) == ["Other 0"]
    (sent,) = tasks.share(EPOCH)
    assert sent["states"]["Other 0"]["large"][0] == 1
    assert tasks.other.memory.transfer()["of_chief"]["Other 0"]["large"][0] == 1
    assert tasks.other.other.large[0] == 0


def test_a_task_takes_over_what_is_due() -> None:
    one, other = Task(0).chief, Task(1).chief
    one.end_unit()
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict() == [False, False]
