"""A task's place in a group that forms anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from insitu.context import Context
from insitu.errors import ExchangeError
from insitu.paths import Paths
from insitu.progress import read_progress
from insitu.roster import RECOVERING, Member, Roster, write_roster
from insitu.spec import TaskId
from insitu.train.elastic.membership import Membership

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


class FailingOnce:
    """A group that comes to nothing when it is first formed anew: a connection is lost meanwhile."""

    def __init__(self, after: Any) -> None:
        self.generation = 1
        self._after = after
        self.tried: list[int] = []

    def leave(self) -> None:
        pass

    def rejoin(self, generation: int, *_: Any, **__: Any) -> None:
        self.tried.append(generation)
        if len(self.tried) == 1:
            self._after()
            raise ExchangeError("worker:1 was lost")
        self.generation = generation


def roster(generation: int) -> Roster:
    members = (Member(W0, 1, "127.0.0.1:1", (0,)), Member(W1, generation, "127.0.0.1:2", (1,)))
    return Roster(generation, members)


def test_a_group_that_came_to_nothing_is_told_with_its_generation(tmp_path: Path) -> None:
    """By that the controller knows that waiting won't help, though nobody has died."""
    context = Context(Paths(tmp_path), "j-1", W0, "c", (0,), 2, stall_timeout=30.0, generation=1)
    job = context.job
    assert job is not None
    job.task(W0).mkdir(parents=True)
    membership = Membership(context, "auto")
    membership.telling.open()
    told: list[tuple[str, int]] = []

    def at_the_loss() -> None:
        write_roster(job.roster, roster(3))

    group = FailingOnce(at_the_loss)
    place = membership.telling.place

    def place_and_look(name: str) -> None:
        place(name)
        record = read_progress(job.progress(W0))
        if record is not None:
            told.append((record.place, record.generation))

    membership.telling.place = place_and_look  # type: ignore[method-assign]
    write_roster(job.roster, roster(2))
    membership._places.rejoin(group, ExchangeError("worker:1 was lost"))  # type: ignore[arg-type]
    assert group.tried == [2, 3]
    assert told == [(RECOVERING, 0), (RECOVERING, 2)]
