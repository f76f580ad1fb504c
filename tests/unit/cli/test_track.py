"""`insitu track`, and the option of `insitu start` by which tasks know their tracker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run
from job_runs import Insitu

from insitu.base.errors import ClusterError, InputError
from insitu.extensions.tracking import trackers


@pytest.fixture
def job(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job that is tracked."""
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    uri = "mlflow:http://host:5000#x"
    started = run(
        "start", "--detach", "--workers", "2", "--track", uri, "data/train", str(insitu.folder), "train.py"
    )
    return insitu.job(started.stdout.strip()).root


def end(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    status = SimpleNamespace(state=SimpleNamespace(phase=phase))
    monkeypatch.setattr("insitu.cluster.read_status", lambda job: status, raising=False)


def test_tasks_find_the_tracker_in_their_environment(job: Path) -> None:
    spec = json.loads((job / "job.json").read_text())
    assert spec["settings"]["INSITU_TRACK"] == "mlflow:http://host:5000#x"


def test_a_tracker_that_cannot_be_used_starts_no_job(insitu: Insitu) -> None:
    for uri, said in (
        ("nobody", r"as insitu\.trackers"),
        ("mlflow", "without mlflow"),
        ("mlflow:http://a:b@c", "no password"),
    ):
        with pytest.raises(InputError, match=said):
            run("start", "--track", uri, "data/train", str(insitu.folder), "train.py")
    assert not list(insitu.paths.jobs.glob("*"))


def test_a_job_that_runs_and_one_without_a_tracker_are_refused(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(monkeypatch, "running")
    with pytest.raises(InputError, match="sends its metrics itself"):
        run("track", job.name)
    end(monkeypatch, "finished")
    with pytest.raises(InputError, match="without either"):
        run("track", job.name)


def test_what_waits_is_sent_with_the_end_of_the_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(monkeypatch, "stopped")
    folder = job / "tracking" / "mlflow-1"
    folder.mkdir(parents=True)
    described = {"tracker": "mlflow", "experiment": "x", "name": job.name, "address": ""}
    (folder / "run.json").write_text(json.dumps(described))
    (folder / "outbox.jsonl").write_text('{"kind": "metrics", "step": 0, "at": 1.0, "values": {}}\n')
    codes, seen = [1, 0], []

    def start_sender(place: Path, *arguments: str) -> Any:
        seen.append((place, arguments, (place / "outbox.jsonl").read_text().count('"end"')))
        return SimpleNamespace(stdin=None, wait=lambda: codes.pop(0))

    monkeypatch.setattr("insitu.extensions.tracking.run_folder.start_sender", start_sender)
    (folder / "status.json").write_text('{"link": "", "problem": "refused"}')
    with pytest.raises(ClusterError, match="takes no records: mlflow: refused"):
        run("track", job.name)
    (folder / "status.json").write_text('{"link": "http://host/1", "problem": ""}')
    assert "All is sent to mlflow: http://host/1" in run("track", job.name).stderr
    assert seen == [(folder, ("--once",), 1)] * 2
    assert '"status": "stopped"' in (folder / "outbox.jsonl").read_text()
