"""What the local engine says of nodes; `tests/process/test_jobs_engine.py` has the rest."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.base.paths import Paths
from insitu.base.spec import NodeId, TaskId, TaskSpec
from insitu.cluster.engines import local
from insitu.cluster.engines.engine import Command, Ended
from insitu.cluster.engines.local import LocalEngine

NODE, LOST = NodeId("node-0"), NodeId("node-1")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path)


@pytest.fixture
def engine(paths: Paths) -> Iterator[LocalEngine]:
    made = LocalEngine(paths.job("digits-1"))
    yield made
    made.close()


def have_stores(engine: LocalEngine) -> list[bool]:
    return [state.has_store for state in engine.node_states([NODE, LOST]).values()]


def test_a_node_whose_folder_is_gone_has_lost_its_store(engine: LocalEngine, paths: Paths) -> None:
    assert have_stores(engine) == [True, True]
    paths.node(NODE).mkdir(parents=True)
    assert have_stores(engine) == [True, False]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_node_whose_folder_cannot_be_looked_at_has_not_lost_its_store(
    engine: LocalEngine, paths: Paths, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    paths.node(NODE).mkdir(parents=True)
    stat = Path.stat

    def failing(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == paths.node(NODE):
            raise OSError(code, os.strerror(code))
        return stat(path, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", failing)
        assert have_stores(engine) == [True, False]


FLOOD = """
import subprocess, sys
flood = "import os\\nwhile True: os.write(1, b'y' * 65536)"
child = subprocess.Popen([sys.executable, "-c", flood], start_new_session=True)
open("flooder", "w").write(str(child.pid))
print("last words", flush=True)
"""


def test_a_process_that_left_the_task_and_floods_its_pipe_delays_no_end(
    engine: LocalEngine, paths: Paths
) -> None:
    """The supervisor read for as long as it wrote, into memory, and saw nothing else."""
    code = paths.job("digits-1").code
    code.mkdir(parents=True)
    command = Command((sys.executable, "-c", FLOOD), dict(os.environ))
    engine.launch(TaskSpec(TaskId("worker", 0), NODE), command)
    deadline, ended = time.monotonic() + 60, None
    try:
        while ended is None:
            assert time.monotonic() < deadline
            for happened in engine.wait(1.0):
                ended = happened if isinstance(happened, Ended) else ended
    finally:
        os.kill(int((code / "flooder").read_text()), signal.SIGKILL)
    assert ended.code == 0


def test_a_task_that_cannot_be_killed_holds_up_no_end(
    engine: LocalEngine, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk that doesn't answer."""
    code = paths.job("digits-1").code
    code.mkdir(parents=True)
    sleeping = Command((sys.executable, "-c", "import time; time.sleep(600)"), dict(os.environ))
    task = TaskSpec(TaskId("worker", 0), NODE)
    engine.launch(task, sleeping)
    monkeypatch.setattr(local, "END_TIMEOUT", 0.05)
    monkeypatch.setattr(local._Running, "kill_group", lambda running, number: None)
    process = engine._running[task.task].process
    engine.close()
    assert process.poll() is None
    process.kill()
    process.wait()
