"""Tasks in step: whoever is lost wherever, the others end as if nothing had happened."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from exchange_ranks import free_addresses, in_threads

import insitu.exchange
from insitu.errors import Diverged, ExchangeError, PeerLost, StaleGeneration, TrainingError
from insitu.exchange import Group
from insitu.train.collectives.gather import squeeze_shards
from insitu.train.elastic.divergence import Fingerprint, check_equal
from insitu.train.elastic.lockstep import Again, Key, Lockstep, Superseded

PATIENCE = 40.0
STEPS = 5


class Killed(Exception):
    """What ends a task in the middle of something."""


class Controller:
    """Gives out places, in memory: `shards` by the members' names, in the order of ranks."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.num_shards = size
        self.generation = 0
        self.shards: dict[str, tuple[int, ...]] = {}
        self.addresses: list[str] = []
        self.publish({f"{index}.1": (index,) for index in range(size)})

    def publish(self, shards: dict[str, tuple[int, ...]]) -> None:
        with self.changed:
            self.generation += 1
            self.shards, self.addresses = shards, free_addresses(len(shards))
            self.changed.notify_all()

    def after(self, generation: int) -> tuple[int, dict[str, tuple[int, ...]], list[str]]:
        with self.changed:
            assert self.changed.wait_for(lambda: self.generation > generation, PATIENCE)
            return self.generation, self.shards, self.addresses


class Task:
    """A script that sums up over shards, step by step; `deaths` says at which (place, step) it is killed.

    It is its own source of places and its own carrier.
    """

    def __init__(self, name: str, controller: Controller, deaths: dict[str, set[tuple[str, int]]]) -> None:
        self.name, self.controller = name, controller
        self.deaths = deaths.get(name, set())
        self.total = 0.0
        self.heard: list[int] = []
        self.lockstep = Lockstep(self, self)
        self.told: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    # Places

    def join(self) -> Group:
        while True:
            generation, shards, addresses = self.controller.after(0)
            self.shards = shards[self.name]
            try:
                return insitu.exchange.join(
                    list(shards).index(self.name),
                    addresses,
                    shards=self.shards,
                    num_shards=self.controller.num_shards,
                    timeout=PATIENCE,
                    stall_timeout=PATIENCE,
                    generation=generation,
                    cancelled=lambda known=generation: self.controller.generation > known,
                )
            except StaleGeneration:
                continue

    def rejoin(self, group: Group, lost: Exception) -> None:
        group.leave()
        known = group.generation
        while True:
            known, shards, addresses = self.controller.after(known)
            self.shards = shards[self.name]
            rank = list(shards).index(self.name)
            with contextlib.suppress(ExchangeError):
                group.rejoin(
                    known,
                    addresses,
                    PATIENCE,
                    rank=rank,
                    shards=self.shards,
                    keep_buffers=False,
                    cancelled=lambda newest=known: self.controller.generation > newest,
                )
                return

    def heed(self, group: Group) -> None:
        if self.controller.generation > group.generation:
            raise Superseded

    # Carrier

    def give(self) -> Any:
        return {"total": np.array(self.total), "heard": self.heard}

    def receive(self, told: Any) -> None:
        self.told = told

    def arrive(self, key: Key) -> None:
        self.total, self.heard = float(self.told["total"]), list(self.told["heard"])

    def fingerprint(self) -> Fingerprint:
        return Fingerprint([("weights/total", np.array(self.total))], [len(self.heard)])

    # The script

    def _at(self, place: str, step: int) -> None:
        if (place, step) in self.deaths:
            raise Killed

    def _run(self) -> None:
        try:
            for step in range(STEPS):
                if self.lockstep.arriving and self.lockstep.goal.key != (0, "train", step):  # type: ignore[union-attr]
                    continue
                self._step(step)
        except BaseException as error:
            self.error = error
        finally:
            if self.error is not None:
                self.close()

    def close(self) -> None:
        if self.lockstep._group is not None:
            self.lockstep._group.close()

    def _step(self, step: int) -> None:
        def work(group: Group) -> Any:
            self._at("begin", step)
            values = np.array([[(step + 1) * (shard + 1) * (1 + self.total)] for shard in self.shards])
            result = group.all_reduce(squeeze_shards(values))
            self._at("reduced", step)
            reduced.append(float(result[0]))
            return squeeze_shards(values * 0 + 1)

        while True:
            reduced: list[float] = []
            try:
                rows = self.lockstep.perform((0, "train", step), work)
                break
            except Again:
                continue
        assert len(rows) == self.controller.num_shards
        self._at("gathered", step)
        self.total += reduced[-1] / 1000
        self.heard.append(step)
        self._at("end", step)


def run(size: int, deaths: dict[str, set[tuple[str, int]]]) -> list[Task]:
    """All tasks that came to the end. Who is killed is replaced by a next life of the same shards."""
    controller = Controller(size)
    tasks = [Task(name, controller, deaths) for name in controller.shards]
    for task in tasks:
        task.thread.start()
    ended = []
    while tasks:
        task = tasks.pop(0)
        task.thread.join(0.01)
        if task.thread.is_alive():
            tasks.append(task)
        elif isinstance(task.error, Killed):
            index, life = task.name.split(".")
            successor = f"{index}.{int(life) + 1}"
            names = [successor if name == task.name else name for name in controller.shards]
            controller.publish(dict(zip(names, controller.shards.values(), strict=True)))
            tasks.append(Task(successor, controller, deaths))
            tasks[-1].thread.start()
        else:
            ended.append(task)
    for task in ended:
        task.close()
        if task.error is not None:
            raise task.error
    return ended


@pytest.fixture(scope="module")
def expected() -> float:
    (total,) = {task.total for task in run(3, {})}
    return total


DEATHS = {
    "at the beginning": {"1.1": {("begin", 0)}},
    "before the reduction": {"1.1": {("begin", 2)}},
    "between the two": {"0.1": {("reduced", 2)}},
    "with the result": {"2.1": {("gathered", 2)}},
    "after the step": {"1.1": {("end", 3)}},
    "two at once": {"0.1": {("begin", 1)}, "2.1": {("begin", 1)}},
    "all but one": {"0.1": {("reduced", 3)}, "1.1": {("gathered", 2)}},
    "a replacement too": {"1.1": {("begin", 1)}, "1.2": {("reduced", 1)}, "1.3": {("begin", 2)}},
    "who gave the state": {"1.1": {("begin", 1)}, "0.1": {("begin", 2)}, "2.1": {("gathered", 3)}},
    "in the last step": {"1.1": {("reduced", 4)}},
}


@pytest.mark.parametrize("name", DEATHS)
def test_whoever_dies_nothing_changes(name: str, expected: float) -> None:
    tasks = run(3, DEATHS[name])
    assert {task.total for task in tasks} == {expected}
    assert [task.heard for task in tasks] == [list(range(STEPS))] * 3
    died = {life for life in DEATHS[name] if life not in {task.name for task in tasks}}
    assert died == set(DEATHS[name]), "an injection has not fired"


def test_shards_move_to_others(expected: float) -> None:
    """A task's shards are taken over by another, at whatever step that happens."""
    controller = Controller(3)
    names = list(controller.shards)
    tasks = [Task(name, controller, {names[1]: {("begin", 2)}}) for name in names]
    for task in tasks:
        task.thread.start()
    tasks[1].thread.join(PATIENCE)
    assert isinstance(tasks[1].error, Killed)
    controller.publish({names[0]: (0, 1), names[2]: (2,)})
    for task in (tasks[0], tasks[2]):
        task.thread.join(PATIENCE)
    for task in (tasks[0], tasks[2]):
        task.close()
        assert task.error is None
        assert task.total == expected


def test_a_script_that_leads_elsewhere_is_told() -> None:
    task = Task("1.2", Controller(1), {})
    task.controller.publish({"1.2": (0,)})
    assert not task.lockstep.arriving
    task.lockstep.goal = type("G", (), {"unit": 3, "key": (0, "test", 1)})()
    with pytest.raises(TrainingError, match="The others are at 0 test 1"):
        task.lockstep.perform((0, "train", 0), lambda group: np.zeros(1))


def test_replicas_that_differ_are_told_on_both_sides() -> None:
    def compare(rank: int, addresses: list[str]) -> str:
        with insitu.exchange.join(rank, addresses, tasks=["worker:0", "worker:1", "worker:2"]) as group:
            same = [("trainable/0", np.ones(5)), ("optimizer/0", np.zeros(2, np.float32))]
            check_equal(group, Fingerprint(same, (1, 2)), "at epoch 1")
            group.barrier()
            drifted = [("trainable/0", np.ones(5)), ("optimizer/0", np.full(2, rank // 2, np.float32))]
            with pytest.raises(Diverged, match="worker:2 from worker:0 in 1 of 3 values") as told:
                check_equal(group, Fingerprint(drifted, (1, 2)), "at epoch 1")
            assert "The first is optimizer/0: worker:0 has" in str(told.value)
            with pytest.raises(Diverged, match="position"):
                check_equal(group, Fingerprint(same, (1, rank)), "at epoch 1")
            return "told"

    assert in_threads(3, compare) == ["told"] * 3


def test_a_loss_that_nobody_can_make_good_is_raised() -> None:
    controller = Controller(2)
    first = Task("0.1", controller, {})
    second = Task("1.1", controller, {"1.1": {("begin", 1)}})

    def give_up(group: Group, lost: Exception) -> None:
        raise lost

    first.rejoin = give_up  # type: ignore[method-assign]
    for task in (first, second):
        task.thread.start()
    first.thread.join(PATIENCE)
    assert isinstance(first.error, PeerLost)
    assert first.heard == [0]
