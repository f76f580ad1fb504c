"""The times at which partitions were brought to hosts."""

from __future__ import annotations

from pathlib import Path

from insitu.base.paths import JobPaths
from insitu.cluster.job_files import append_copy, read_copies


def test_times_are_read_back_without_what_was_cut_off(tmp_path: Path) -> None:
    job = JobPaths(tmp_path)
    assert read_copies(job) == []
    append_copy(job, 1.0, 2.5)
    append_copy(job, 2.0, 3.0)
    with job.copies.open("a") as file:
        file.write('{"began": 9.0, "ended": NaN}\n{"began": 5.0, "ended": 4.0}\n{"began": 4.0, "en')
    assert read_copies(job) == [(1.0, 2.5), (2.0, 3.0)]


def test_a_job_goes_on_where_times_cannot_be_written(tmp_path: Path) -> None:
    append_copy(JobPaths(tmp_path / "missing"), 1.0, 2.0)
