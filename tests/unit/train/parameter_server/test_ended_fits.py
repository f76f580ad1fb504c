"""A later incarnation of a task knows where fits ended, unless the servers are new."""

from __future__ import annotations

from pathlib import Path

from insitu.base.context import Context
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.train.parameter_server import EndedFits


def test_ends_are_read_again_where_the_servers_know_them(tmp_path: Path) -> None:
    context = Context(Paths(tmp_path), "job-1", TaskId("worker", 0), "cache", (0,), 1)
    assert context.job is not None
    context.job.fits(context.task).parent.mkdir(parents=True)
    first = EndedFits(context)
    assert first.read() == []
    first.append(20)
    first.append(35)
    assert EndedFits(context).read() == [20, 35]
    assert EndedFits(context).read_valid(applied=35) == [20, 35]
    assert EndedFits(context).read_valid(applied=34) == []


def test_outside_a_job_they_are_of_the_process(tmp_path: Path) -> None:
    ends = EndedFits(Context(Paths(tmp_path)))
    ends.append(3)
    assert ends.read() == [3]
