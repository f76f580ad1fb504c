"""What a supervisor does before a job begins; `tests/process/test_jobs.py` has the rest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.control import supervisor
from insitu.cluster.control.supervised_tasks import SupervisedTasks
from insitu.cluster.engines.channel import Channel
from insitu.cluster.engines.engine import Command


def test_a_socket_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: JobPaths) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(supervisor, "listen_for_requests", refuse)
    with pytest.raises(ClusterError, match=r"can't begin.*Operation not permitted\. Set INSITU_HOME"):
        supervisor.open_request_socket(JobPaths(tmp_path))


def test_a_socket_of_a_dead_supervisor_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        supervisor.open_request_socket(JobPaths(tmp_path)).close()


def test_the_end_of_a_job_names_the_last_error_of_its_controllers(tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "digits-1")
    job.root.mkdir()
    assert "none wrote why" in supervisor.describe_controller_deaths(job)
    job.controller_log.write_bytes(b"Traceback\n" * 1000 + b"ValueError: no \xff\n\n")
    text = supervisor.describe_controller_deaths(job)
    assert "died 60 times within 60 s: ValueError: no \N{REPLACEMENT CHARACTER}. All" in text
    assert str(job.controller_log) in text and "`insitu resume digits-1`" in text


class QuietEngine:
    """Runs nothing."""

    def wait(self, timeout: float | None) -> list[object]:
        time.sleep(0.01)
        return []

    def reserve(self, tasks: object) -> dict[object, str]:
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobPaths]:
    """A job whose controllers are what the test makes of `control`."""
    job = JobPaths(tmp_path / "digits-1")
    job.root.mkdir()
    monkeypatch.setattr(supervisor, "open_engine", lambda *_: QuietEngine())
    monkeypatch.setattr(supervisor, "read_spec", lambda _: SimpleNamespace(engine="local"))
    monkeypatch.setattr(supervisor, "CONTROLLER_TIMEOUT", 0.3)
    before = signal.getsignal(signal.SIGCHLD)
    yield job
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_controller_that_says_nothing_is_killed_and_replaced(
    quiet: JobPaths, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """It was never noticed: nobody watched for stalls, and `insitu stop` waited for ever."""
    mark = quiet.root / "first"

    def control(job: JobPaths, lock: int, channel: Channel, listener: object) -> int:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP) if not hangs else time.sleep(600)
        SupervisedTasks(channel, os.pipe()[0]).finish(7)
        return 0

    monkeypatch.setattr(supervisor, "control", control)
    assert supervisor.supervise(quiet, -1, None) == (7, "")  # type: ignore[arg-type]
    how = "hangs" if hangs else "is suspended"
    assert f"controller {how}: it said nothing for 0.3 s. It is killed" in quiet.output.read_text()


def test_the_engine_learns_which_shards_a_task_reads_before_it_launches_it(
    quiet: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It didn't: a task that moved to another host started before its partitions were there."""
    launched: list[TaskSpec] = []
    task = TaskSpec(TaskId("worker", 1), NodeId("host3"), (1, 3))

    class Engine(QuietEngine):
        def launch(self, task: TaskSpec, command: Command) -> int:
            launched.append(task)
            return os.getpid()

    def control(job: JobPaths, lock: int, channel: Channel, listener: object) -> int:
        tasks = SupervisedTasks(channel, os.pipe()[0])
        tasks.launch(task, 2, Command(("python",), {}))
        tasks.finish(7)
        return 0

    monkeypatch.setattr(supervisor, "open_engine", lambda *_: Engine())
    monkeypatch.setattr(supervisor, "control", control)
    assert supervisor.supervise(quiet, -1, None) == (7, "")  # type: ignore[arg-type]
    assert launched == [task]


def test_a_controller_that_goes_on_is_left_alone(quiet: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.cluster.control.supervised_tasks.BEAT_INTERVAL", 0.02)
    monkeypatch.setattr(supervisor, "CONTROLLER_TIMEOUT", 1.0)

    def control(job: JobPaths, lock: int, channel: Channel, listener: object) -> int:
        tasks = SupervisedTasks(channel, os.pipe()[0])
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            tasks.wait(None)
        tasks.finish(7)
        return 0

    monkeypatch.setattr(supervisor, "control", control)
    assert supervisor.supervise(quiet, -1, None) == (7, "")  # type: ignore[arg-type]
    assert not quiet.output.exists() or "killed" not in quiet.output.read_text()


def test_a_supervisor_that_was_suspended_itself_blames_nobody(
    quiet: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = supervisor.Supervisor(quiet, QuietEngine())  # type: ignore[arg-type]
    times = iter([0.0, 10_000.0])
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: next(times, 10_000.0))
    watched.serve()
    assert watched.silence <= 2 * supervisor.LOOK_INTERVAL
    watched.close()
