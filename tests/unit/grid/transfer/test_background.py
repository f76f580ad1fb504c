"""Tasks are done in threads, and can be asked about until a while after their end."""

from __future__ import annotations

import threading
import time

import pytest

from insitu.base.errors import GridError
from insitu.grid.transfer import background
from insitu.grid.transfer.background import AT_ONCE, Task, Tasks


def ended(tasks: Tasks, name: str | None) -> dict[str, object]:
    assert name is not None
    deadline = time.monotonic() + 60
    while not (found := tasks.describe(name) or {}).get("ended"):
        assert time.monotonic() < deadline, found
        time.sleep(0.001)
    return found


def test_a_task_says_how_far_it_is_and_what_it_found() -> None:
    tasks, go = Tasks(), threading.Event()

    def do(task: Task) -> None:
        task.add(3, 2)
        task.results.append("x")
        assert go.wait(60)

    name = tasks.start(10, do)
    assert name is not None and tasks.describe("other") is None
    found = tasks.describe(name)
    assert found is not None and (found["ended"], found["total"], found["results"]) == (False, 10, [])
    go.set()
    assert ended(tasks, name) == {
        "ended": True, "done": 3, "total": 10, "moved": 2, "problem": "", "results": ["x"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GridError("no room"), "no room"),
        (OSError(28, "No space left on device", "/a/path"), "a file can't be used (No space left on device)"),
    ],
)
def test_a_failure_is_said_without_a_path(error: Exception, said: str) -> None:
    def fail(task: Task) -> None:
        raise error

    tasks = Tasks()
    assert ended(tasks, tasks.start(0, fail))["problem"] == said


def test_there_are_a_few_at_a_time_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, go = Tasks(), threading.Event()
    names = [tasks.start(0, lambda task: go.wait(60) and None) for _ in range(AT_ONCE)]
    assert None not in names and tasks.start(0, lambda task: None) is None
    go.set()
    for name in names:
        ended(tasks, name)
    monkeypatch.setattr(background, "_KEPT_SECONDS", 0.0)
    ended(tasks, tasks.start(0, lambda task: None))
    assert tasks.describe(names[0] or "") is None
