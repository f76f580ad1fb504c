"""A job's logs."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cluster.job_files import logs as module
from insitu.cluster.job_files.logs import JobLogs, MergedLog, rotated_path

W0 = TaskId("worker", 0)


def test_a_note_that_is_no_text_is_escaped(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    MergedLog(job).log("FileNotFoundError: a\udcff")
    assert b"a\\udcff" in job.output.read_bytes()


def test_logs_keep_the_raw_bytes_and_merge_whole_lines(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    logs.write(W0, b"a\nb", 0.0)
    MergedLog(job).log("note")
    logs.write(W0, b"c\nd", 0.0)
    logs.finish()
    assert job.task_log(W0, 1).read_bytes() == b"a\nbc\nd"
    assert job.output.read_bytes() == b"[worker:0] a\n[insitu] note\n[worker:0] bc\n[worker:0] d\n"
    assert MergedLog(job).size() == job.output.stat().st_size
    job.output.unlink()
    assert MergedLog(job).size() == 0


def test_output_lost_to_a_full_disk_is_told_once_there_is_room(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    whole = logs._merged._log
    with open("/dev/full", "ab", buffering=0) as full:
        logs._merged._log = full
        logs.write(W0, b"lost\n", 0.0)
    logs._merged._log = whole
    logs.write(W0, b"kept\n", 0.0)
    logs.finish()
    first, second = job.output.read_bytes().splitlines()
    assert b"16 bytes of output could not be written" in first and second == b"[worker:0] kept"


def read_rotated(path: Path) -> bytes:
    older = rotated_path(path)
    return (older.read_bytes() if older.exists() else b"") + path.read_bytes()


def test_a_log_is_rotated_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOG_BYTES", 1000)
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    for number in range(60):
        logs.write(W0, f"line {number:03d} of some twenty bytes\n".encode(), 0.0)
        MergedLog(job).log("note")
    first = read_rotated(job.task_log(W0, 1))
    assert first.startswith(b"line 000 ") and first.count(b"\n") == 60 and b"dropped" not in first
    for number in range(60, 300):
        logs.write(W0, f"line {number:03d} of some twenty bytes\n".encode(), 0.0)
    logs.finish()
    for path in (job.task_log(W0, 1), job.output):
        text = read_rotated(path)
        assert len(text) < 2300 and b"[insitu] the log before this is in " in text
        numbers = [int(line.rpartition(b"line ")[2][:3]) for line in text.splitlines() if b"line " in line]
        assert numbers == list(range(numbers[0], 300)), "the newest lines are all there"
        assert sorted(p.name for p in path.parent.glob(f"{path.name}*")) == [path.name, f"{path.name}.1"]


def test_the_log_of_controllers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes append to it by a descriptor that they have inherited."""
    monkeypatch.setattr(module, "MAX_CONTROLLER_LOG_BYTES", 1000)
    job = JobPaths(tmp_path)
    older = rotated_path(job.controller_log)
    module.bound_controller_log(job)  # there is none yet
    with job.controller_log.open("ab", buffering=0) as inherited:
        inherited.write(b"short\n")
        module.bound_controller_log(job)
        assert not older.exists()
        for number in range(4):
            inherited.write(b"x" * 5000 + f"last of {number}\n".encode())
            module.bound_controller_log(job)
            assert job.controller_log.stat().st_size == 0
            assert older.stat().st_size == 1000
            assert older.read_bytes().endswith(f"last of {number}\n".encode())
        inherited.write(b"continues\n")
    assert job.controller_log.read_bytes() == b"continues\n"
    assert older.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["controller.log", "controller.log.1"]


def test_a_disk_that_refuses_a_new_log_costs_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOG_BYTES", 100)
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    logs.write(W0, b"x" * 100 + b"\n", 0.0)
    original = Path.open

    def refuse(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "ab":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        for _ in range(3):
            logs.write(W0, b"lost\n", 0.0)
    logs.write(W0, b"kept\n", 0.0)
    logs.finish()
    note = b"[insitu] 15 bytes of output could not be written: no room was left\n"
    assert read_rotated(job.task_log(W0, 1)) == b"x" * 100 + b"\n" + note + b"kept\n"
    assert b"48 bytes of output could not be written" in job.output.read_bytes()


class Disk:
    """A disk on which so much is free, for tasks and the user's other files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 0
        monkeypatch.setattr(module.os, "statvfs", self)

    def __call__(self, path: Any) -> Any:
        return SimpleNamespace(f_bavail=self.free, f_blocks=1 << 30, f_frsize=1)


def test_output_leaves_room_for_the_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    for free in (2 << 20, 1 << 20, 0, 2 << 20, 1 << 20):
        disk.free = free
        logs.write(W0, f"{free:8}\n".encode(), 0.0)
    logs.finish()
    MergedLog(job).log("job finished")
    # A line has 20 bytes, with the name of its task.
    assert job.output.read_text().splitlines() == [
        f"[worker:0] {2 << 20:8}",
        "[insitu] 40 bytes of output could not be written: no room was left",
        f"[worker:0] {2 << 20:8}",
        "[insitu] 20 bytes of output could not be written: no room was left",
        "[insitu] job finished",
    ]


class Narrow:
    """A log on a disk that takes so many bytes more."""

    def __init__(self, log: Any, room: int) -> None:
        self.log, self.room = log, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.log.write(data[: self.room])
        self.room -= taken
        return int(taken)

    def close(self) -> None:
        self.log.close()


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(1, 60)), max_size=12))
def test_the_number_of_lost_bytes_is_true(steps: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "output.log")
        log = module._OutputLog(path)
        log._log = narrow = Narrow(log._log, 0)
        for room, length in steps:
            narrow.room = room
            log.write(b"x" * length)
        narrow.room = 1 << 20
        log.close()
        text = path.read_bytes()
        notes = re.findall(
            rb"\[insitu\] (\d+) bytes of output could not be written: no room was left\n", text
        )
        assert text.count(b"x") + sum(map(int, notes)) == sum(length for _, length in steps)


def test_a_log_that_may_not_grow_is_put_aside_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_file_size_limit", lambda: 400)
    job = JobPaths(tmp_path)
    logs = JobLogs(job)
    logs.open(W0, 1)
    for number in range(40):
        logs.write(W0, f"line {number:2}\n".encode(), 0.0)
        assert max(path.stat().st_size for path in tmp_path.rglob("*.log*")) < 400
    logs.finish()
    assert job.output.read_text().splitlines()[-1] == "[worker:0] line 39"


def test_a_disk_that_fails_when_a_log_is_closed_is_no_error(tmp_path: Path) -> None:
    class Failing:
        def fileno(self) -> int:
            return 0

        def close(self) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    logs = JobLogs(JobPaths(tmp_path))
    logs.open(W0, 1)
    logs._tasks[W0][0].close()
    logs._tasks[W0][0]._log._file = Failing()  # type: ignore[attr-defined]
    logs.finish()
