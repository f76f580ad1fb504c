"""Jobs that have ended are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu

from insitu.cluster import BrokenJob, JobStatus, Journal, submit
from insitu.cluster.client import submission
from insitu.cluster.decide.events import SubmittedEvent
from insitu.cluster.decide.job import advance
from insitu.options import JobOptions
from insitu.service import JobIndex
from insitu.service import jobs as module


def test_an_ended_job_is_read_again_only_when_its_journal_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insitu = Insitu(tmp_path)
    insitu.script("print('hello')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    first, second = (
        insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1)))
        for _ in range(2)
    )
    index = JobIndex(insitu.paths)
    listed = index.list()
    assert [job["job_id"] for job in listed] == [second.root.name, first.root.name]
    read: list[str] = []
    summarize = module.summarize_job

    def note(status: JobStatus | BrokenJob) -> dict[str, Any]:
        read.append("broken" if isinstance(status, BrokenJob) else status.spec.job_id)
        return summarize(status)

    monkeypatch.setattr(module, "summarize_job", note)
    assert index.list() == listed and read == []
    journal = Journal(first.journal)
    state, actions = advance(journal.state(), SubmittedEvent(), 1.0)
    journal.record(1.0, SubmittedEvent(), actions, state)
    index.list()
    assert read == [first.root.name]
    second.journal.unlink()
    assert [job["state"] for job in index.list() if job["job_id"] == second.root.name] == ["unreadable"]
