"""Logs that grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.spec import TaskId
from insitu.cluster.job_files import logs
from insitu.cluster.job_files.logs import follow, rotated_path

W0 = TaskId("worker", 0)


def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"one\ntw")
    steps = iter([b"o\nthree\n", b"rest"])

    def over() -> bool:
        """Writes on at each look; over once there is nothing to add."""
        more = next(steps, None)
        with path.open("ab") as file:
            file.write(more or b"")
        return more is None

    assert [line for lines in follow(path, over, poll_interval=0) for line in lines] == [
        b"one",
        b"two",
        b"three",
        b"rest",
    ]


@pytest.mark.parametrize("lines_between_looks", [1, 10, 35, 60])
def test_a_log_is_followed_across_rotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines_between_looks: int
) -> None:
    """A follower that comes to look often enough misses no line, wherever a line is cut in two."""
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 500)
    log = logs.RotatedLog(tmp_path / "output.log")
    written = 0

    def over() -> bool:
        nonlocal written
        for _ in range(lines_between_looks):
            if written == 200:
                break
            log.write(f"line {written:03d} ".encode())
            log.write(b"continues\n")
            written += 1
        return written == 200

    found = [line for lines in follow(tmp_path / "output.log", over, poll_interval=0) for line in lines]
    numbers = [int(line[5:8]) for line in found if line.startswith(b"line")]
    if lines_between_looks < 35:
        assert numbers == list(range(200))
    else:
        # Too slow: it continues with the oldest part that is left.
        assert numbers == sorted(set(numbers)) and numbers[-1] == 199
    log.close()


def test_a_replay_begins_with_the_older_part(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"two\nthree\n")
    rotated_path(path).write_bytes(b"one\n")
    assert [*follow(path, lambda: True)] == [[b"one"], [b"two", b"three"]]
    assert [*follow(path, lambda: True, start=4)] == [[b"three"]]
    # As where a job is resumed whose log has been rotated since.
    assert [*follow(path, lambda: True, start=400)] == [[b"two", b"three"]]
