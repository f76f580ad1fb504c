"""What a job has written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cluster import Journal, find_event_folders, find_export, list_outputs
from insitu.cluster.decide.events import SubmittedEvent
from insitu.cluster.decide.job import advance
from insitu.cluster.decide.job_state import JobState, TaskState

STARTED = 1000.0


def write(path: Path, changed: float = STARTED + 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("12345")
    os.utime(path, (changed, changed))


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    job = JobPaths(tmp_path / "job")
    job.root.mkdir()
    journal = Journal(job.journal)
    state = JobState(tasks=(TaskState(TaskId("worker", 0)),), max_restarts=0)
    journal.create(state)
    state, actions = advance(state, SubmittedEvent(), STARTED)
    journal.record(STARTED, SubmittedEvent(), actions, state)
    write(job.code / "pretrained.keras", STARTED - 1)
    write(job.code / "train.py", STARTED - 1)
    return job


def test_what_came_with_the_script_is_not_what_it_has_written(job: JobPaths) -> None:
    assert list_outputs(job) == []
    with pytest.raises(InputError, match=r"model\.save.*with none"):
        find_export(job)


def test_models_event_files_predictions_and_other_files_are_found(job: JobPaths) -> None:
    for name in ("model.keras", "tb/events.out.tfevents.1", "log.csv", "sm/saved_model.pb", "sm/variables/a"):
        write(job.code / name)
    write(job.code / "__pycache__" / "a.pyc")
    write(job.all_summaries / "worker-0" / "events.out.tfevents.2")
    folder = job.predictions("digits/guess", 0)
    folder.mkdir(parents=True)
    (folder / "done.json").write_text(json.dumps({"cache": "digits/guess"}))
    elsewhere = job.root.parent / "guess.csv"
    for number, file in enumerate((job.code / "guess.parquet", job.code / "guess.parquet", elsewhere)):
        write(file)
        folder = job.predictions("file-1", number)
        folder.mkdir(parents=True)
        (folder / "done.json").write_text(json.dumps({"file": str(file), "rows": 3}))
    found = [(each.path, each.kind, each.bytes) for each in list_outputs(job)]
    assert found == [
        ("code/model.keras", "model", 5),
        ("code/sm", "model", 10),
        (str(elsewhere), "predictions", 5),
        ("code/guess.parquet", "predictions", 5),
        ("digits/guess", "predictions", None),
        ("code/tb/events.out.tfevents.1", "events", 5),
        ("summaries/worker-0/events.out.tfevents.2", "events", 5),
        ("code/log.csv", "file", 5),
    ]
    assert find_event_folders(job) == [job.code, job.all_summaries]


def test_the_model_that_a_script_has_saved_last_is_exported(job: JobPaths) -> None:
    write(job.code / "first.keras", STARTED + 1)
    write(job.code / "last.keras", STARTED + 9)
    write(job.code / "weights.h5", STARTED + 99)
    model = find_export(job)
    assert (model.path.name, model.exporter, model.step) == ("last.keras", "", STARTED + 9)
    with pytest.raises(InputError, match="with none of exporters"):
        find_export(job, best=True)
