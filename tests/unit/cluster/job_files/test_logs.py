"""A job's logs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from insitu.cluster.job_files import logs as module
from insitu.cluster.job_files.logs import JobLogs, MergedLog
from insitu.cluster.job_files.tail import rotated_path
from insitu.paths import JobPaths
from insitu.spec import TaskId

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
    whole = logs._merged
    with open("/dev/full", "ab", buffering=0) as full:
        logs._merged = full
        logs.write(W0, b"lost\n", 0.0)
    logs._merged = whole
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
        inherited.write(b"goes on\n")
    assert job.controller_log.read_bytes() == b"goes on\n"
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
    assert read_rotated(job.task_log(W0, 1)) == b"x" * 100 + b"\nkept\n"
    assert b"bytes of output could not be written" in job.output.read_bytes()


def test_a_disk_that_fails_when_a_log_is_closed_is_no_error(tmp_path: Path) -> None:
    class Failing:
        def fileno(self) -> int:
            return 0

        def close(self) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    logs = JobLogs(JobPaths(tmp_path))
    logs.open(W0, 1)
    logs._tasks[W0][0].close()
    logs._tasks[W0][0]._file = Failing()  # type: ignore[attr-defined]
    logs.finish()
