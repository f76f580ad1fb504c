"""A job's lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError, JobRunning
from insitu.base.spec import TaskId
from insitu.cluster.job_files.lock import (
    find_other_host,
    is_locked,
    read_controller,
    signal_controller,
    take_lock,
    write_controller_pid,
)

W0 = TaskId("worker", 0)


def test_the_lock_is_held_until_its_last_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    assert not is_locked(path)
    lock = take_lock(path)
    assert is_locked(path)
    with pytest.raises(JobRunning, match="locked"):
        take_lock(path)
    inherited = os.dup(lock)
    os.close(lock)
    assert is_locked(path)
    os.close(inherited)
    assert not is_locked(path)


def test_the_holder_is_signalled_and_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    lock = take_lock(path)
    write_controller_pid(lock)
    received: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    try:
        assert signal_controller(path, signal.SIGUSR2)
        assert received == [signal.SIGUSR2]
        os.close(lock)
        assert not signal_controller(path, signal.SIGUSR2)
        assert len(received) == 1
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no job knows."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def test_a_number_that_another_process_has_by_now_is_never_signalled(
    tmp_path: Path, innocent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.cluster.job_files.lock._PID_TIMEOUT", 0.1)
    path = tmp_path / "controller.json"
    lock = take_lock(path)
    write_controller_pid(lock)
    record = json.loads(path.read_text())
    os.pwrite(lock, json.dumps({**record, "pid": innocent.pid}).encode().ljust(os.fstat(lock).st_size), 0)
    with pytest.raises(ClusterError, match="can't be reached"):
        signal_controller(path, signal.SIGKILL)
    assert innocent.poll() is None
    os.close(lock)


def test_what_another_host_wrote_is_never_signalled(
    tmp_path: Path, innocent: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "controller.json"
    lock = take_lock(path)
    assert find_other_host(path) == ""
    path.write_text(json.dumps({"host": "far-1", "pid": innocent.pid, "start": 1}))
    assert find_other_host(path) == "far-1"
    assert read_controller(path) is None
    with pytest.raises(ClusterError, match="runs on far-1"):
        signal_controller(path, signal.SIGKILL)
    assert innocent.poll() is None
    os.close(lock)


def test_a_lock_says_at_once_which_host_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "controller.json"
    lock = take_lock(path)
    monkeypatch.setattr("insitu.cluster.job_files.lock.read_host", lambda: "another")
    # A host may get another name while it runs; it is the same until it starts again.
    assert find_other_host(path) == ""
    monkeypatch.setattr("insitu.cluster.job_files.lock.read_boot", lambda: "another")
    assert find_other_host(path)
    os.close(lock)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": null, "start": 1}', '{"host": "h", "pid": 1}'])
def test_a_damaged_record_names_nobody(tmp_path: Path, text: str) -> None:
    path = tmp_path / "controller.json"
    path.write_text(text)
    assert read_controller(path) is None
