"""Which jobs there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.cluster.client.status import find_job, list_job_ids
from insitu.errors import UnknownJob
from insitu.paths import Paths
from insitu.spec import TaskId

W0 = TaskId("worker", 0)


def test_jobs_are_found_by_the_beginning_of_their_id(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    assert list_job_ids(paths) == []
    for name in ("digits-aa11", "digits-aa11b", "digits-bb22", ".staged"):
        (paths.jobs / name).mkdir(parents=True)
    assert find_job(paths, "digits-b").root.name == "digits-bb22"
    assert find_job(paths, "digits-aa11").root.name == "digits-aa11"
    with pytest.raises(UnknownJob, match="could be any of these"):
        find_job(paths, "digits")
    with pytest.raises(UnknownJob, match="Did you mean digits-bb22"):
        find_job(paths, "digit-bb22")
    for text in ("", ".staged", "../x"):
        with pytest.raises(UnknownJob):
            find_job(paths, text)
