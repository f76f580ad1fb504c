"""The command that shows event files."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.errors import InputError
from insitu.paths import JobPaths
from insitu.service import has_summaries, make_tensorboard_command


def test_the_command_names_the_event_files_of_the_job(tmp_path: Path) -> None:
    job = JobPaths(tmp_path / "job")
    assert not has_summaries(job)
    (job.all_summaries / "worker-0").mkdir(parents=True)
    (job.all_summaries / "worker-0" / "events.out.tfevents.1").touch()
    assert has_summaries(job)
    command = make_tensorboard_command(job, "127.0.0.1", 0, lambda name: name)
    assert command[1:5] == ["-m", "tensorboard.main", "--logdir", str(job.all_summaries)]
    with pytest.raises(InputError, match=r"insitu\[tensorboard\]"):
        make_tensorboard_command(job, "127.0.0.1", 0, lambda name: None)
