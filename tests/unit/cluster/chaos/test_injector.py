"""What faults are made of: the same seed gives the same ones, and a list is checked before anything runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.cluster.chaos.injector import (
    Fault,
    _opened,
    draw_faults,
    find_leftovers,
    parse_fault,
    plan_faults,
    read_results,
)
from insitu.cluster.decide.job_state import TaskState

W1 = TaskId("worker", 1)


def test_faults_follow_from_the_seed() -> None:
    assert draw_faults(3, 30, 2) == draw_faults(3, 30, 2) != draw_faults(4, 30, 2)
    drawn = draw_faults(3, 200, 3)
    assert {f.kind for f in drawn} == {"kill", "stop", "delay", "controller", "checkpoint"}
    assert {f.task for f in drawn if f.task} == {TaskId("worker", i) for i in range(3)}
    assert {f.kind for f in plan_faults([], 1, 20, 2, "drop,node")} == {"drop", "node"}


@pytest.mark.parametrize("text", ["kill worker:1 2.5", "controller 3.0", "kill worker:1", "half-open"])
def test_a_fault_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_fault(text)) == text
    assert parse_fault("kill worker:1 2.5") == Fault("kill", W1, (2, 5))


@pytest.mark.parametrize("text", ["", "burn", "kill worker", "kill worker:1 2", "kill boss:1"])
def test_what_is_no_fault_is_told(text: str) -> None:
    with pytest.raises(InputError):
        parse_fault(text)


def test_unknown_kinds_are_told() -> None:
    with pytest.raises(InputError, match="burn"):
        plan_faults([], 1, 20, 2, "kill,burn")


def test_results_are_what_tasks_said_and_leftovers_what_they_left(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    job = paths.job("j-1")
    job.root.mkdir(parents=True)
    job.output.write_text("[worker:0] RESULT a\n[worker:1] RESULT a\n[worker:0] Epoch\n[insitu] RESULTS\n")
    assert read_results(job) == ["RESULT a"]
    assert find_leftovers(paths, job) == []
    names = [".progress.123", ".roster.json.123", ".roster.json.123.0a1b2c3d"]
    for name in names:
        (job.root / name).touch()
    assert sorted(find_leftovers(paths, job)) == names


def test_only_processes_of_the_job_are_hit(tmp_path: Path) -> None:
    """The journal may name a number that another process has by now."""
    job = Paths(tmp_path).job("j-1")
    for environment, hit in (
        ({}, False),
        ({"INSITU_JOB_ID": "j-1"}, True),
        ({"INSITU_JOB_ID": "j-10"}, False),
    ):
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        try:
            victim = TaskState(W1, pid=child.pid, alive=True)
            if hit:
                with _opened(job, victim) as process:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                assert child.wait(60) == -signal.SIGKILL
                continue
            with pytest.raises(ClusterError, match="none of this job"), _opened(job, victim):
                pass
            assert child.poll() is None
        finally:
            child.kill()
            child.communicate()
    with pytest.raises(ClusterError, match="has ended"), _opened(job, victim):
        pass
