"""What `insitu top` shows of a job, and the numbers that it serves."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu

from insitu.base.errors import ClusterError, InputError
from insitu.base.measure.task_samples import Sample, SampleWriter
from insitu.base.paths import JobPaths
from insitu.base.progress import ProgressWriter
from insitu.base.spec import TaskId
from insitu.cli import top as module
from insitu.cli.describe import describe
from insitu.cli.metrics import serve_metrics
from insitu.cli.top import build_top, top
from insitu.cluster import Journal, submit
from insitu.cluster.client import submission
from insitu.cluster.decide.events import LaunchedEvent, SubmittedEvent, TaskExitedEvent
from insitu.cluster.decide.job import advance
from insitu.options import JobOptions

W0, W1 = TaskId("worker", 0), TaskId("worker", 1)


@pytest.fixture
def job(insitu: Insitu) -> JobPaths:
    """A job of two workers that has ended, of which the first has trained."""
    made = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=2)))
    journal = Journal(made.journal)
    state = journal.state()
    began = json.loads(made.spec.read_text())["created"]
    events = (
        (1.0, SubmittedEvent()),
        (2.0, LaunchedEvent(((W0, 17), (W1, 18)))),
        (12.0, TaskExitedEvent(W0, 0, progress=(1, 4), incarnation=1)),
        (12.0, TaskExitedEvent(W1, 0, progress=(1, 4), incarnation=1)),
    )
    for seconds, event in events:
        state, actions = advance(state, event, began + seconds)
        journal.record(began + seconds, event, actions, state)
    writer = SampleWriter(made.samples(W0))
    for number in range(1, 9):
        writer.write(
            Sample(
                at=began + 4 + number,
                attempt=1,
                started=began + 2,
                epoch=1,
                step=4 * number,
                updates=4 * number,
                steps=4 * number,
                rows=512 * number,
                metrics={"loss": 1 / number, "worst": float("inf")},
                place="gradient",
                seconds={"import": 2.0, "gradient": 0.75 * number, "wait": 0.25 * number},
                last={"worker:1": 3 * number, "worker:0": number},
                cpu=1.5 * number,
                memory=123_000_000,
                gpus=[{"index": 0, "utilization": 0.93, "memory": 4_100_000_000, "memory_total": 8e9}],
            )
        )
    ProgressWriter(made.progress(W0)).write(1, 31, 4096, "idle")
    return made


def test_json_has_the_documented_names(job: JobPaths, capsys: pytest.CaptureFixture[str]) -> None:
    top(job.root.name, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["job_id"], shown["state"], shown["updates"]) == (job.root.name, "finished", 32)
    assert shown["metrics"] == {"loss": 0.125, "worst": None}
    assert (shown["rows_per_second"], shown["step_seconds"]) == (512, 0.25)
    first, second = shown["tasks"]
    assert (first["task"], first["alive"], first["place"], first["step"]) == ("worker:0", False, "idle", 31)
    assert first["rates"]["split"] == pytest.approx({"gradient": 0.1875, "wait": 0.0625})
    assert (first["rates"]["cpu"], first["rates"]["memory"]) == (1.5, 123_000_000)
    assert first["rates"]["gpus"][0]["utilization"] == 0.93
    assert second["rates"] is None and second["place"] is None


def test_of_a_task_on_another_host_the_samples_tell_where_it_is(job: JobPaths) -> None:
    job.progress(W0).unlink()
    first, second = build_top(job)["tasks"]
    assert (first["place"], first["epoch"], first["step"]) == ("gradient", 1, 32)
    assert second["place"] is None


def test_people_see_a_table(job: JobPaths, capsys: pytest.CaptureFixture[str]) -> None:
    top(job.root.name)
    facts, _, header, first, second = capsys.readouterr().out.splitlines()
    assert "update 32, loss = 0.125, worst = -, 512 examples/s, 250 ms/step" in facts
    assert header.split()[:3] == ["TASK", "ROWS/S", "STEP"]
    assert "512" in first and "gradient 75 %, wait 25 %" in first and "123.0 MB" in first
    assert "0: 93 % 4.1 GB" in first and "worker:1" in second


def test_describe_shows_rates_and_where_the_time_went(
    job: JobPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    describe(job.root.name, goodput=True)
    shown = capsys.readouterr().out
    assert "gradient 75 %, wait 25 %" in shown
    assert "Goodput: 25.0% of 12s (12.0 s) went into" in shown
    assert "worker:1 on " in shown and "came last in 75% of the steps" in shown
    describe(job.root.name, goodput=True, as_json=True)
    account = json.loads(capsys.readouterr().out)["goodput"]
    assert account["wall"] == pytest.approx(12.0) and account["goodput"] == pytest.approx(0.25)
    assert sum(account["seconds"].values()) == pytest.approx(12.0)
    own = account["tasks"][0]["seconds"]
    assert own == pytest.approx({"queueing": 2.0, "import": 2.0, "gradient": 6.0, "wait": 2.0})
    assert next(loss["activity"] for loss in account["losses"]) == "import"
    assert account["tasks"][0]["segments"][0]["start"] == 0.0


def test_a_job_without_a_task_has_no_time_to_account_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setenv("INSITU_HOME", str(insitu.paths.home))
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    made = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=2)))
    describe(made.root.name, goodput=True)
    top(made.root.name)
    assert "worker:1" in capsys.readouterr().out


def test_prometheus_reads_the_numbers(job: JobPaths) -> None:
    pytest.importorskip("prometheus_client")
    server = serve_metrics(lambda: [job, JobPaths(job.root.parent / "gone")], "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        with pytest.raises(InputError, match="port that is free"):
            serve_metrics(list, "127.0.0.1", server.port)
    finally:
        server.close()
    name = job.root.name
    node = build_top(job)["tasks"][0]["node"]
    labels = f'job="{name}",node="{node}",task="worker:0"'
    for line in (
        f"insitu_task_steps_total{{{labels}}} 32.0",
        f"insitu_task_rows_total{{{labels}}} 4096.0",
        f"insitu_task_memory_bytes{{{labels}}} 1.23e+08",
        f'insitu_task_gpu_utilization{{gpu="0",{labels}}} 0.93',
        f'insitu_job_metric{{job="{name}",metric="loss"}} 0.125',
        f'insitu_job_updates{{job="{name}"}} 32.0',
    ):
        assert line in lines
    assert not any("secret" in line for line in lines)


def test_options_that_exclude_each_other_are_refused(job: JobPaths) -> None:
    with pytest.raises(InputError, match="serves until Ctrl-C"):
        top(job.root.name, once=True, metrics_port=0)
    with pytest.raises(InputError, match="Received: none"):
        top(None)


def test_without_the_library_the_user_learns_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(InputError, match=r"insitu\[metrics\]"):
        serve_metrics(list, "127.0.0.1", 0)


def test_tensorboard_ends_where_a_job_that_has_ended_wrote_nothing(
    job: JobPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: served.append(command))
    with pytest.raises(ClusterError, match="which has ended and has written nothing"):
        module.tensorboard(job.root.name, port=0, host="127.0.0.1")
    monkeypatch.setattr("insitu.cluster.is_running", lambda job: True)
    module.tensorboard(job.root.name, port=0, host="127.0.0.1")
    assert len(served) == 1 and "nothing for TensorBoard yet" in capsys.readouterr().err
