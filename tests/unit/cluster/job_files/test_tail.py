"""Logs that grow."""

from __future__ import annotations

from pathlib import Path

from insitu.cluster.job_files.tail import follow
from insitu.spec import TaskId

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
