"""Tasks in step: whoever is lost wherever, the others end as if nothing had happened."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
from free_ports import free_addresses

import insitu.exchange
from insitu.base.errors import CollectiveMismatch, ExchangeError, PeerLost, StaleGeneration, TrainingError
from insitu.exchange import Group
from insitu.train.collectives.gather import squeeze_shards
from insitu.train.elastic.divergence import Fingerprint
from insitu.train.elastic.lockstep import GenerationChanged, Lockstep, ResumePoint, RetryStep
from insitu.train.elastic.position import CUSTOM_LOOP, SETUP, TEST, TRAIN, LoopPosition

TIMEOUT = 40.0
STEPS = 5


class Killed(Exception):
    """Ends a task in the middle of something."""


def at(step: int) -> LoopPosition:
    return LoopPosition(0, TRAIN, step=step)


class Controller:
    """Publishes generations, in memory: `shards` by the members' names, in the order of ranks."""

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
            assert self.changed.wait_for(lambda: self.generation > generation, TIMEOUT)
            return self.generation, self.shards, self.addresses


class Task:
    """A script that sums up over shards, step by step; `deaths` says at which (place, step) it is killed.

    It is its own rendezvous and its own provider of state.
    """

    def __init__(self, name: str, controller: Controller, deaths: dict[str, set[tuple[str, int]]]) -> None:
        self.name, self.controller = name, controller
        self.deaths = deaths.get(name, set())
        self.total = 0.0
        self.done: list[int] = []
        self.lockstep = Lockstep(self, self)
        self.staged: Any = None
        self.error: BaseException | None = None
        self.ended: tuple[str, ...] = ()
        self.thread = threading.Thread(target=self._run, daemon=True)

    # Rendezvous

    def describe_sums(self) -> dict[str, str]:
        return {}

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
                    timeout=TIMEOUT,
                    stall_timeout=TIMEOUT,
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
                    TIMEOUT,
                    rank=rank,
                    shards=self.shards,
                    keep_buffers=False,
                    cancelled=lambda newest=known: self.controller.generation > newest,
                )
                return

    def raise_if_superseded(self, group: Group) -> None:
        if self.controller.generation > group.generation:
            raise GenerationChanged

    # StateProvider

    def state_dict(self) -> Any:
        return {"total": np.array(self.total), "done": self.done}

    def stage(self, state: Any) -> None:
        self.staged = state

    def resume(self, position: LoopPosition) -> None:
        self.total, self.done = float(self.staged["total"]), list(self.staged["done"])

    def begin_unit(self, group: Group, position: LoopPosition) -> None:
        pass

    def end_unit(self, position: LoopPosition) -> None:
        pass

    def fingerprint(self) -> Fingerprint:
        return Fingerprint([("weights/total", np.array(self.total))], [len(self.done)])

    # The script

    def _at(self, place: str, step: int) -> None:
        if (place, step) in self.deaths:
            raise Killed

    def _run(self) -> None:
        try:
            for step in range(STEPS):
                point = self.lockstep.find_resume_point()
                if point is not None and point.position != at(step):
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
                rows = self.lockstep.run_unit(at(step), work)
                break
            except RetryStep:
                continue
        assert len(rows) == self.controller.num_shards
        self._at("gathered", step)
        self.total += reduced[-1] / 1000
        self.done.append(step)
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
    assert [task.done for task in tasks] == [list(range(STEPS))] * 3
    died = {life for life in DEATHS[name] if life not in {task.name for task in tasks}}
    assert died == set(DEATHS[name]), "an injection has not fired"


def test_shards_move_to_others(expected: float) -> None:
    """A task's shards are taken over by another, at whatever step that happens."""
    controller = Controller(3)
    names = list(controller.shards)
    tasks = [Task(name, controller, {names[1]: {("begin", 2)}}) for name in names]
    for task in tasks:
        task.thread.start()
    tasks[1].thread.join(TIMEOUT)
    assert isinstance(tasks[1].error, Killed)
    controller.publish({names[0]: (0, 1), names[2]: (2,)})
    for task in (tasks[0], tasks[2]):
        task.thread.join(TIMEOUT)
    for task in (tasks[0], tasks[2]):
        task.close()
        assert task.error is None
        assert task.total == expected


def test_a_script_that_leads_elsewhere_is_an_error() -> None:
    task = Task("1.2", Controller(1), {})
    task.controller.publish({"1.2": (0,)})
    assert task.lockstep.find_resume_point() is None
    task.lockstep._resume_point = ResumePoint(3, LoopPosition(0, TEST, test=1))
    with pytest.raises(TrainingError, match="are at call 0 test epoch 0 step 0 test 1, and this script"):
        task.lockstep.run_unit(at(0), lambda group: np.zeros(1))
    task.close()


def test_a_replacement_skips_a_unit_that_the_others_have_done() -> None:
    task = Task("0.1", Controller(1), {})
    done: list[LoopPosition] = []

    def work(group: Group) -> Any:
        done.append(position)
        return squeeze_shards(np.ones((1, 1)))

    task.staged = {"total": np.array(2.0), "done": [0]}
    setup, position = LoopPosition(0, SETUP), at(1)
    assert task.lockstep.find_resume_point() is None
    task.lockstep._resume_point = ResumePoint(7, position)
    assert len(task.lockstep.run_unit_until_done(setup, work)) == 0
    assert done == []
    assert len(task.lockstep.run_unit_until_done(position, work)) == 1
    assert (done, task.total, task.lockstep.find_resume_point()) == ([position], 2.0, None)
    task.close()


def test_a_loss_that_nobody_can_make_good_is_raised() -> None:
    controller = Controller(2)
    first = Task("0.1", controller, {})
    second = Task("1.1", controller, {"1.1": {("begin", 1)}})

    def give_up(group: Group, lost: Exception) -> None:
        raise lost

    first.rejoin = give_up  # type: ignore[method-assign]
    for task in (first, second):
        task.thread.start()
    first.thread.join(TIMEOUT)
    assert isinstance(first.error, PeerLost)
    assert first.done == [0]


def test_a_step_that_lacks_an_ended_task_is_refused_but_an_interrupted_one_is_done_again() -> None:
    controller = Controller(1)
    task = Task("0.1", controller, {})
    units: list[LoopPosition] = []

    def work(group: Group) -> Any:
        units.append(position)
        if len(units) == 1:
            task.ended = ("worker:1",)
            controller.publish({"0.1": (0,)})
            raise GenerationChanged
        return np.ones(1)

    position = at(0)
    with contextlib.closing(task):
        with pytest.raises(RetryStep):
            task.lockstep.run_unit(position, work)
        assert task.lockstep.run_unit(position, work).tolist() == [[1.0]]
        position = LoopPosition(1, TEST)
        task.lockstep.run_unit(position, work)
        position = at(1)
        with pytest.raises(CollectiveMismatch, match="the script of worker:1 has ended"):
            task.lockstep.run_unit(position, work)
        assert len(units) == 3


def test_an_interrupted_step_of_a_scripts_own_loop_is_not_done_again() -> None:
    controller = Controller(1)
    task = Task("0.1", controller, {})

    def work(group: Group) -> Any:
        task.ended = ("worker:1",)
        controller.publish({"0.1": (0,)})
        raise GenerationChanged

    with contextlib.closing(task), pytest.raises(CollectiveMismatch, match="a step of their loop"):
        task.lockstep.run_unit(CUSTOM_LOOP, work)
