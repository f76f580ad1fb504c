"""What `insitu describe` shows of a job that no process runs, and of names that fit nothing."""

from __future__ import annotations

import errno
import json
import os

import pytest
from job_runs import Insitu

from insitu.base.errors import UnknownJob
from insitu.base.evaluations import Evaluation, append_evaluation
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cli.describe import describe
from insitu.cluster import Journal, submit
from insitu.cluster.decide.events import SubmittedEvent, TaskExitedEvent
from insitu.cluster.decide.job import advance
from insitu.options import JobOptions
from insitu.service import format_staleness
from insitu.service.jobs import _read_servers

W0 = TaskId("worker", 0)


def make_job(insitu: Insitu) -> JobPaths:
    """A job whose only worker was killed in epoch 1 (from 0) and then ended well."""
    job = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1)))
    journal = Journal(job.journal)
    state = journal.state()
    events = (SubmittedEvent(), TaskExitedEvent(W0, -9, progress=(1, 4)))
    for at, event in enumerate(events, 1):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    return job


def test_json_has_the_documented_names_and_counts_from_zero(
    insitu: Insitu, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(make_job(insitu).root.name, as_json=True, events=True)
    shown = json.loads(capsys.readouterr().out)
    (task,) = shown["task_list"]
    assert (task["task"], task["attempt"], task["code"]) == ("worker:0", 1, -9)
    assert shown["attempts"][0]["progress"] == {"epoch": 1, "step": 4}
    assert [e["event"]["event"] for e in shown["events"]] == ["Submitted", "TaskExited"]
    assert shown["events"][0]["actions"][0] == {"action": "Publish", "generation": 1}


def test_what_the_evaluator_has_found_is_shown(insitu: Insitu, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(insitu)
    for epoch in range(1, 31):
        scores = {"loss": 1.5 / epoch, "accuracy": 0.25}
        append_evaluation(job.evaluations, Evaluation(f"epoch {epoch}", epoch, 0, None, scores, 1e9, 0.5))
    describe(job.root.name, as_json=True)
    shown = json.loads(capsys.readouterr().out)["evaluations"]
    assert [each["epoch"] for each in shown] == list(range(1, 31))
    assert shown[2]["metrics"] == {"loss": 0.5, "accuracy": 0.25} and shown[2]["iterations"] is None
    describe(job.root.name)
    text = capsys.readouterr().out
    assert "loss 0.05, accuracy 0.25" in text and "epoch 11 " in text and "epoch 10 " not in text


def test_people_read_it_counted_as_keras_counts(insitu: Insitu, capsys: pytest.CaptureFixture[str]) -> None:
    describe(make_job(insitu).root.name, events=True)
    shown = capsys.readouterr().out
    assert "epoch 2 step 5" in shown and "Strategy:" not in shown
    assert "worker:0 was killed by SIGKILL" in shown
    assert "TaskExited  task=worker:0, code=-9" in shown


def test_how_gradients_travel_is_shown(insitu: Insitu, capsys: pytest.CaptureFixture[str]) -> None:
    from insitu.base.context import Context
    from insitu.train.strategies.communication import publish_choice

    job = make_job(insitu)
    publish_choice(Context(insitu.paths, job_id=job.root.name), "MirroredStrategy", "ring")
    publish_choice(Context(insitu.paths), "MirroredStrategy", "outside of all jobs")
    describe(job.root.name)
    assert "Strategy:    MirroredStrategy, gradients: ring\n" in capsys.readouterr().out


def test_a_full_disk_does_not_keep_a_strategy_from_being_made(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from insitu.base.context import Context
    from insitu.train.strategies.communication import publish_choice

    job = make_job(insitu)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("insitu.base.disk.durable.os.fsync", refuse)
    publish_choice(Context(insitu.paths, job_id=job.root.name), "MirroredStrategy", "ring")
    shown = capsys.readouterr().err
    assert "No room is left" in shown and str(job.root) in shown and "Training continues" in shown


def test_a_beginning_that_several_jobs_share_is_told_as_such(insitu: Insitu) -> None:
    first, second = make_job(insitu).root.name, make_job(insitu).root.name
    with pytest.raises(UnknownJob) as error:
        describe("data-train-", as_json=False)
    assert error.value.matches == tuple(sorted((first, second)))
    assert "could be any of these" in str(error.value)


def test_a_name_that_fits_nothing_is_told_of_both_kinds(insitu: Insitu) -> None:
    with pytest.raises(UnknownJob, match=r"data/trian.*No job's id is or begins with"):
        describe("data/trian")


def test_staleness_is_shown_by_its_powers_of_two() -> None:
    assert format_staleness({"counts": [12, 30, 2, 0, 1]}) == "0: 12, 1: 30, 2-3: 2, 8-15: 1"
    assert format_staleness({"counts": []}) == "none yet"


def test_the_newest_report_of_each_server_counts(insitu: Insitu) -> None:
    request = JobOptions("data/train", insitu.folder, ("train.py",), workers=1, ps=2)
    job = insitu.job(submit(insitu.paths, request))
    from insitu.cluster import read_placement

    placement, _ = read_placement(job)

    def report(index: int, *servers: tuple[int, int]) -> None:
        known = [{"server": server, "applied": applied} for server, applied in servers]
        job.server_account(TaskId("ps", index)).write_text(json.dumps({"servers": known}))

    report(0, (0, 5))
    assert [s["applied"] for s in _read_servers(job, placement.tasks)] == [5]
    report(1, (1, 7), (0, 9))  # it took over the other one
    assert [s["applied"] for s in _read_servers(job, placement.tasks)] == [9, 7]
