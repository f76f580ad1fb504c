"""The folder of a run: each step once, also through kills, and no error for the training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.base.tracking import Tracking
from insitu.extensions.tracking import run_folder
from insitu.extensions.tracking.run_folder import RunFolder, choose_folder
from insitu.extensions.tracking.trackers import RunSpec

TRACKING = Tracking("mlflow", "http://host", "x")


class Sender:
    """A process that does nothing."""

    stdin = None
    returncode = 0

    def poll(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "start_sender", lambda folder, *arguments: Sender())
    monkeypatch.setattr(run_folder.atexit, "register", lambda call: None)


def open_run(folder: Path) -> RunFolder:
    return RunFolder(folder, TRACKING, RunSpec("http://host", "x", "job-1"))


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outbox.jsonl").read_text().splitlines()]


def test_each_step_of_a_metric_is_written_once_by_all_processes_of_a_job(tmp_path: Path) -> None:
    first = open_run(tmp_path / "run")
    first.log_parameters({"a": 1})
    for step in (0, 1, 2):
        first.log_metrics(step, {"loss": 1.0})
    with (tmp_path / "run" / "outbox.jsonl").open("ab") as file:
        file.write(b'{"kind": "metrics", "st')  # a kill
    second = open_run(tmp_path / "run")
    assert second.began == first.began
    second.log_parameters({"a": 1})
    second.log_metrics(2, {"loss": 1.0, "val_loss": 2.0})
    second.log_metrics(3, {"loss": 1.0})
    second.log_metrics(1, {"loss": 1.0})
    records = read(tmp_path / "run")
    assert [each["kind"] for each in records].count("parameters") == 1
    written = [(each["step"], sorted(each["values"])) for each in records if each["kind"] == "metrics"]
    assert written == [(0, ["loss"]), (1, ["loss"]), (2, ["loss"]), (2, ["val_loss"]), (3, ["loss"])]


def test_the_end_names_the_files(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    run.list_files = lambda: [Path("/x/model.keras")]
    run.finish()
    assert read(tmp_path / "run") == [
        {"kind": "file", "path": "/x/model.keras"},
        {"kind": "end", "status": "finished"},
    ]


def test_a_disk_that_fails_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(tmp_path / "run")
    (tmp_path / "run" / "outbox.jsonl").mkdir()
    for step in range(3):
        run.log_metrics(step, {"loss": 1.0})
    run.finish()
    assert capsys.readouterr().err.count("nothing more is tracked: IsADirectoryError") == 1


def test_a_folder_that_cannot_be_made_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run = open_run(tmp_path / "file" / "run")
    run.log_metrics(0, {"loss": 1.0})
    assert capsys.readouterr().err.count("nothing more is tracked: NotADirectoryError") == 1


def test_each_tracker_and_experiment_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = {
        choose_folder(tmp_path, each)
        for each in (TRACKING, Tracking("mlflow", "http://host", "y"), Tracking("mlflow"), Tracking("wandb"))
    }
    assert len(folders) == 4 and choose_folder(tmp_path, TRACKING) in folders
    assert "secret" not in str(folders) and sys.platform == "linux"
