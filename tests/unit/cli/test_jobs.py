"""The commands that start, follow and stop jobs, on folders of jobs that no process runs."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import click
import pytest
from command_line import CliRunner
from job_runs import Insitu

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import JobPaths
from insitu.base.progress import ProgressWriter
from insitu.base.spec import TaskId
from insitu.cli import jobs, logs
from insitu.cli.describe import describe
from insitu.cluster import Journal, submit
from insitu.cluster.decide.events import ControllerLostEvent, Event, SubmittedEvent, TaskExitedEvent
from insitu.cluster.decide.job import advance
from insitu.options import JobOptions

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


def make_job(insitu: Insitu, *events: Event) -> JobPaths:
    """A job of two workers to which these events happened."""
    job = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=2)))
    journal = Journal(job.journal)
    state = journal.state()
    for at, event in enumerate(events, 1):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    return job


@pytest.fixture
def replaced(insitu: Insitu) -> JobPaths:
    """A job in which worker 1 alone was replaced: its second incarnation is part of the first attempt."""
    exited = TaskExitedEvent(W1, -9, progress=(0, 3), elastic=(W0,), incarnation=1)
    job = make_job(insitu, SubmittedEvent(), exited)
    (state,) = [t for t in Journal(job.journal).state().tasks if t.task == W1]
    assert state.incarnation == 2 and len(Journal(job.journal).state().attempts) == 1
    for number in (1, 2):
        job.task_log(W1, number).write_text(f"incarnation {number}\n")
    return job


def shown(job: JobPaths, *arguments: Any, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    logs.logs(job.root.name, *arguments, **options)
    return capsys.readouterr().out


@pytest.mark.parametrize("follow_it", [False, True])
def test_logs_show_the_latest_incarnation_of_a_task(
    replaced: JobPaths, capsys: pytest.CaptureFixture[str], follow_it: bool
) -> None:
    assert shown(replaced, "worker:1", follow_it, capsys=capsys) == "incarnation 2\n"
    assert shown(replaced, "worker:1", follow_it, 1, capsys=capsys) == "incarnation 1\n"
    assert shown(replaced, "worker:1", follow_it, 2, capsys=capsys) == "incarnation 2\n"


def test_an_incarnation_that_there_never_was_is_an_error(replaced: JobPaths) -> None:
    with pytest.raises(InputError, match=r"had 2 incarnations\. Give --attempt 1 to 2\. Received: 3"):
        logs.logs(replaced.root.name, "worker:1", incarnation=3)
    with pytest.raises(InputError, match="has no task ps:0"):
        logs.logs(replaced.root.name, "ps:0")


def test_an_incarnation_whose_log_is_still_to_come_is_not_the_latest(
    replaced: JobPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    replaced.task_log(W1, 2).unlink()
    assert shown(replaced, "worker:1", capsys=capsys) == "incarnation 1\n"
    replaced.task_log(W1, 1).unlink()
    with pytest.raises(InputError, match="once it has been started"):
        logs.logs(replaced.root.name, "worker:1")


def test_following_a_task_goes_on_with_its_replacement(replaced: JobPaths) -> None:
    looks = iter([False, False, True, True])
    third = replaced.task_log(W1, 3)

    def is_over() -> bool:
        if not third.exists():
            third.write_text("incarnation 3\n")
        return next(looks)

    lines = [line for batch in logs.follow_task(replaced, "worker:1", None, is_over) for line in batch]
    assert lines == [b"incarnation 2", b"incarnation 3"]


def test_the_shell_completes_tasks_of_the_job(replaced: JobPaths) -> None:
    def complete(job: str | None, incomplete: str) -> list[str]:
        return logs.complete_task(SimpleNamespace(params={"job_id": job}), incomplete)  # type: ignore[arg-type]

    assert complete(replaced.root.name, "") == ["worker:0", "worker:1"]
    assert complete(replaced.root.name, "worker:1") == ["worker:1"]
    assert complete("no-such-job", "") == complete(None, "") == []


def test_logs_print_the_lines_of_insitu_with_the_others(
    insitu: Insitu, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(insitu)
    job.output.write_text("[worker:0] a\n[insitu] attempt 2 starts\n[worker:0] b\n")
    logs.logs(job.root.name)
    assert capsys.readouterr() == ("[worker:0] a\n[insitu] attempt 2 starts\n[worker:0] b\n", "")


def test_ps_shows_progress_as_keras_counts_and_how_long_a_job_lasted(
    insitu: Insitu, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(insitu, SubmittedEvent())
    ProgressWriter(job.progress(W0)).write(0, 2, 30, "gradient")
    jobs.ps(all_jobs=True)
    header, row = capsys.readouterr().out.splitlines()
    assert "DURATION" in header and "AGE" not in header
    assert "epoch 1 step 3" in row
    jobs.ps(all_jobs=True, as_json=True)
    (summary,) = json.loads(capsys.readouterr().out)
    assert summary["progress"] == {"epoch": 0, "step": 2}


def test_ps_and_describe_say_why_a_job_ended(insitu: Insitu, capsys: pytest.CaptureFixture[str]) -> None:
    reason = f"the job's controller died 60 times within 60 s: {'x' * 60}. All of it is in its log"
    job = make_job(insitu, SubmittedEvent(), ControllerLostEvent(reason))
    jobs.ps(all_jobs=True)
    header, row = capsys.readouterr().out.splitlines()
    assert header.endswith("REASON") and row.endswith(f"{reason[:57]}...")
    describe(job.root.name)
    assert reason in capsys.readouterr().out


def test_a_folder_without_a_job_is_told_as_such(insitu: Insitu) -> None:
    folder = insitu.paths.job("empty").root
    folder.mkdir(parents=True)
    for show in (logs.logs, logs.attach):
        with pytest.raises(ClusterError, match=r"holds no job.*Delete the folder"):
            show("empty")


def test_a_log_that_was_deleted_is_an_error(insitu: Insitu) -> None:
    job = make_job(insitu)
    job.output.unlink()
    for show in (logs.logs, logs.attach):
        with pytest.raises(ClusterError, match=r"No such file.*insitu describe"):
            show(job.root.name)


def test_what_has_started_or_changed_a_job_prints_it(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().run
    arguments = ["data/train", str(insitu.folder), "train.py"]
    job_id = run(["start", "--detach", *arguments]).stdout.strip()
    assert insitu.job(job_id).root.is_dir()
    started = json.loads(run(["start", "--detach", "--json", *arguments]).stdout)
    assert insitu.job(started["job_id"]).root.is_dir() and started["cache"] == "data/train"
    refused = run(["start", "--json", *arguments])
    assert isinstance(refused.exception, InputError) and "goes with --detach" in str(refused.exception)
    monkeypatch.setattr("insitu.cluster.client.job_requests._request", lambda *_: "as asked")
    monkeypatch.setattr("insitu.cluster.client.job_requests.end_job", lambda *_: None)
    changed = run(["scale", job_id, "1", "--json"])
    assert json.loads(changed.stdout)["job_id"] == job_id and changed.stderr == "as asked\n"


def test_following_a_job_that_is_killed_ends_with_why(
    insitu: Insitu, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(insitu, SubmittedEvent())
    job.output.write_text("[worker:0] a\n")
    with pytest.raises(click.exceptions.Exit) as ended:
        logs.attach(job.root.name)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.startswith(
        f"{job.root.name} failed: the job's processes were all ended from outside"
    )
    job.output.write_text("[worker:0] a\n[insitu] job failed with exit code 1: why\n")
    with pytest.raises(click.exceptions.Exit):
        logs.attach(job.root.name)
    assert capsys.readouterr().err == "[insitu] job failed with exit code 1: why\n"
