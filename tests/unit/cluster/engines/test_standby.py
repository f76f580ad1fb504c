"""A process that stands by becomes a task with its environment; until then it is nobody."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines.engine import Command, Ended, Output
from insitu.cluster.engines.local import LocalEngine

W0 = TaskSpec(TaskId("worker", 0), NodeId("node-0"))
SCRIPT = """
import os, sys, random
print(os.getpid(), os.environ["INSITU_TASK"], os.environ["OTHER"], sys.argv[1:], __name__, random.random())
"""


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    made = Paths(tmp_path).job("job-1")
    made.code.mkdir(parents=True)
    return made


@pytest.fixture
def engine(job: JobPaths) -> Iterator[LocalEngine]:
    made = LocalEngine(job)
    yield made
    made.close()


@pytest.fixture
def command(tmp_path: Path, job: JobPaths) -> Command:
    (job.code / "train.py").write_text(SCRIPT)
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "INSITU_HOME": str(tmp_path),
        "INSITU_JOB_ID": "job-1",
        "INSITU_TASK": "worker:0",
        "INSITU_SEED": "4",
        "OTHER": "x",
    }
    arguments = (sys.executable, "-P", "-m", "insitu.cluster.task.entry", "train.py", "a b")
    return Command(arguments, environment)


def words(engine: LocalEngine) -> list[str]:
    """What the task printed, once it has ended well."""
    output = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for happened in engine.wait(1.0):
            if isinstance(happened, Output):
                output += happened.data
            elif isinstance(happened, Ended):
                assert happened.code == 0, output
                return output.decode().split()
    raise AssertionError("the task did not end")


def test_a_standby_becomes_the_task_as_if_it_had_been_started(engine: LocalEngine, command: Command) -> None:
    engine.keep_standby(1, command)
    (pid,) = engine._standbys.pids
    assert b"INSITU_TASK" not in Path(f"/proc/{pid}/environ").read_bytes()
    other = replace(command, environment={**command.environment, "INSITU_TASK": "worker:7"})
    assert engine.launch(W0, other) == pid
    warm = words(engine)
    engine.launch(W0, command)
    cold = words(engine)
    assert warm[:2] == [str(pid), "worker:7"] and cold[0] != str(pid)
    assert warm[2:] == cold[2:] == ["x", "['a", "b']", "__main__", cold[-1]]


def test_it_becomes_the_task_though_another_process_holds_its_connection(
    engine: LocalEngine, command: Command
) -> None:
    """As a controller does that was forked while the standby was there."""
    engine.keep_standby(1, command)
    (pid,) = engine._standbys.pids
    go_on, ended = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        os.read(go_on, 1)
        os._exit(0)
    try:
        engine.launch(W0, command)
        assert words(engine)[0] == str(pid)
    finally:
        os.close(ended)
        os.close(go_on)
        os.waitpid(child, 0)


def test_one_of_another_environment_does_not_fit(engine: LocalEngine, command: Command) -> None:
    engine.keep_standby(1, command)
    (pid,) = engine._standbys.pids
    engine.launch(W0, replace(command, environment={**command.environment, "OTHER": "y"}))
    assert words(engine)[0] != str(pid) and engine._standbys.pids == {pid}


def test_none_is_left_once_none_is_wanted(engine: LocalEngine, command: Command) -> None:
    engine.keep_standby(2, command)
    assert len(engine._standbys.pids) == 2
    engine.keep_standby(0, command)
    assert engine._standbys.pids == set()


def test_one_that_dies_is_forgotten(engine: LocalEngine, command: Command) -> None:
    engine.keep_standby(1, replace(command, arguments=(*command.arguments[:4], "no_such_script.py")))
    deadline = time.monotonic() + 60
    while engine._standbys.pids and time.monotonic() < deadline:
        assert engine.wait(0.1) == []
    assert engine._standbys.pids == set()


LISTENS = """
import os, socket
from insitu.base.net import ports
host, port = os.environ["INSITU_LISTENER"].lstrip(":").split(":")
with ports.take_inherited(host, int(port)) as listener:
    listener.listen()
    print(host + ":" + port, os.environ["INSITU_LISTENER"])
"""


def test_a_standby_gets_the_socket_of_its_task(engine: LocalEngine, job: JobPaths, command: Command) -> None:
    (job.code / "train.py").write_text(LISTENS)
    engine.keep_standby(1, command)
    (pid,) = engine._standbys.pids
    address = engine.reserve([W0])[W0.task]
    assert engine.launch(W0, command) == pid
    # The script's own children don't get it.
    assert words(engine) == [address, f":{address}"]
