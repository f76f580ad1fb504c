"""A job's lock."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from insitu.cluster.job_files.lock import is_locked, signal_controller, take_lock, write_controller_pid
from insitu.errors import ClusterError
from insitu.spec import TaskId

W0 = TaskId("worker", 0)


def test_the_lock_is_held_until_its_last_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "controller.json"
    assert not is_locked(path)
    lock = take_lock(path)
    assert is_locked(path)
    with pytest.raises(ClusterError, match="locked"):
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
