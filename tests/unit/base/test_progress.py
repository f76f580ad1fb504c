"""A task's last word can be read at any time, whatever it is just doing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from insitu.base import progress
from insitu.base.progress import Progress, ProgressWriter, read_progress


def test_progress_tells_of_elasticity(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "progress")
    writer.write(0, 1, 2, "gradient")
    before = read_progress(tmp_path / "progress")
    assert before is not None and (before.elastic, before.generation) == (False, 0)
    writer.elastic, writer.generation = True, 7
    writer.write(0, 2, 2, "exchange")
    after = read_progress(tmp_path / "progress")
    writer.close()
    assert after is not None
    assert (after.elastic, after.generation, after.place, after.step) == (True, 7, "exchange", 2)


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "progress") is None
    ProgressWriter(tmp_path / "progress").close()
    assert read_progress(tmp_path / "progress") is None
    (tmp_path / "progress").write_bytes(b"something else")
    assert read_progress(tmp_path / "progress") is None


def test_what_is_half_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    writer = ProgressWriter(path)
    for step in range(5):
        writer.write(0, step, 10, "gradient")
    writer.close()
    whole = path.read_bytes()
    half = len(whole) // 2
    steps = set()
    for at in (3, half + 3):
        torn = bytearray(whole)
        torn[at] ^= 1
        path.write_bytes(torn)
        last = read_progress(path)
        assert last is not None
        steps.add(last.step)
    assert steps == {3, 4}


WRITES = """
import sys
from pathlib import Path
from insitu.base.progress import ProgressWriter
writer = ProgressWriter(Path(sys.argv[1]))
step = 0
while True:
    writer.write(0, step, 10 * step, "gradient" if step % 2 else "exchange")
    if step == 0:
        print("begun", flush=True)
    step += 1
"""


def consistent(path: Path) -> Progress:
    """The last word, which must be there and of one piece."""
    read = read_progress(path)
    assert read is not None
    assert read.rows == 10 * read.step
    assert read.place == ("gradient" if read.step % 2 else "exchange")
    return read


def test_a_last_word_is_heard_while_the_next_one_is_written(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"begun\n"
            before = 0
            for _ in range(100):
                deadline = time.monotonic() + 60
                while (read := consistent(path)).step <= before:
                    assert time.monotonic() < deadline
                before = read.step
                # As often as not it stands still between two words, or in the middle of one.
                os.kill(process.pid, signal.SIGSTOP)
                before = max(before, consistent(path).step)
                os.kill(process.pid, signal.SIGCONT)
        finally:
            process.kill()
    # Killed in the middle of anything, it has left its last whole word.
    assert consistent(path).step >= before


@pytest.mark.timeout(30)
def test_threads_of_one_process_may_read(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "progress")
    writer.write(0, 0, 0, "gradient")
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            writer.write(0, step, step, "gradient")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(100):
            read = read_progress(tmp_path / "progress")
            assert read is not None and read.rows == read.step
    finally:
        done.set()
        thread.join(60)
    writer.close()


def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task that began while the disk was full failed, and with it soon the job."""
    make, tries = progress._make_record, []

    def full(path: Path) -> object:
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(path)

    monkeypatch.setattr(progress, "_make_record", full)
    monkeypatch.setattr(progress, "_RETRY_INTERVAL", 0)
    writer = ProgressWriter(tmp_path / "progress")
    writer.write(1, 2, 3, "gradient")
    writer.close()
    found = read_progress(tmp_path / "progress")
    assert found is not None and (found.epoch, found.step) == (1, 2) and len(tries) == 3
    assert capsys.readouterr().err.count("No room is left") == 1


def test_a_disk_that_stays_full_or_refuses_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([errno.ENOSPC, errno.EACCES])

    def refuse(path: Path) -> object:
        raise OSError(next(numbers), "refused")

    monkeypatch.setattr(progress, "_make_record", refuse)
    monkeypatch.setattr(progress, "FULL_DISK_TIMEOUT", -1.0)
    with pytest.raises(OSError, match="refused"):
        ProgressWriter(tmp_path / "progress")
    monkeypatch.setattr(progress, "FULL_DISK_TIMEOUT", 60.0)
    with pytest.raises(OSError, match="refused"):
        ProgressWriter(tmp_path / "progress")
