"""The command that shows event files."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths
from insitu.service import has_summaries, make_tensorboard_command


def test_the_command_names_the_event_files_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobPaths(tmp_path / "job")
    folders: list[Path] = []
    monkeypatch.setattr("insitu.cluster.find_event_folders", lambda _: folders, raising=False)
    assert not has_summaries(job)
    folders.append(job.code)
    assert str(job.code) in make_tensorboard_command(job, "127.0.0.1", 0, lambda name: name)
    folders.append(job.all_summaries)
    assert str(job.root) in make_tensorboard_command(job, "127.0.0.1", 0, lambda name: name)
    folders.remove(job.code)
    assert has_summaries(job)
    command = make_tensorboard_command(job, "127.0.0.1", 0, lambda name: name)
    assert command[1:5] == ["-m", "tensorboard.main", "--logdir", str(job.all_summaries)]
    with pytest.raises(InputError, match=r"insitu\[tensorboard\]"):
        make_tensorboard_command(job, "127.0.0.1", 0, lambda name: None)
