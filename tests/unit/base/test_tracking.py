"""URIs of experiment trackers, and what may be said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.base.tracking import Tracking, hide_secrets, parse_tracking, read_runs


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("mlflow", Tracking("mlflow")),
        ("mlflow:http://host:5000", Tracking("mlflow", "http://host:5000")),
        ("mlflow:http://host:5000#census", Tracking("mlflow", "http://host:5000", "census")),
        ("mlflow:sqlite:////data/runs.db#a", Tracking("mlflow", "sqlite:////data/runs.db", "a")),
        ("wandb#team/project", Tracking("wandb", "", "team/project")),
        ("trackio:user/space", Tracking("trackio", "user/space")),
    ],
)
def test_a_uri_names_a_tracker_its_address_and_an_experiment(uri: str, found: Tracking) -> None:
    assert parse_tracking(uri) == found


@pytest.mark.parametrize(
    "uri",
    [
        "mlflow:https://me:secret@host",
        "mlflow:https://secret@host",
        "trackio:http://host:7860/?write_token=secret#a",
        "x:http://host?API_KEY=secret",
    ],
)
def test_a_uri_with_a_secret_is_refused_without_being_shown(uri: str) -> None:
    with pytest.raises(InputError, match="no password and no token") as refused:
        parse_tracking(uri)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("uri", ["", "http//host", ":x", "a b"])
def test_what_names_no_tracker_is_refused(uri: str) -> None:
    with pytest.raises(InputError, match=r"TRACKER\[:ADDRESS\]"):
        parse_tracking(uri)


def test_messages_of_libraries_lose_their_secrets(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_TOKEN": "abcdef123", "HF_TOKEN_FILE": str(tmp_path), "NAME": "visible"}
    said = f"GET https://u:p@host/?write_token=xyz&page=2 abcdef123 visible {tmp_path}"
    shown = hide_secrets(said, environ)
    assert shown == f"GET https://***@host/?write_token=***&page=2 *** visible {tmp_path}"


def test_the_runs_of_a_job_say_how_many_records_wait(tmp_path: Path) -> None:
    assert read_runs(tmp_path) == []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run = {"tracker": "mlflow", "experiment": name, "name": "job-1"}
        (tmp_path / name / "run.json").write_text(json.dumps(run))
    (tmp_path / "a" / "outbox.jsonl").write_bytes(b"one\ntwo\nthree\n")
    (tmp_path / "a" / "sent").write_text("4")
    (tmp_path / "a" / "status.json").write_text('{"link": "http://host/1", "problem": "refused"}')
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text("{")
    first, second = read_runs(tmp_path)
    assert (first["link"], first["waiting"], first["problem"]) == ("http://host/1", 2, "refused")
    assert (second["link"], second["waiting"], second["problem"]) == (None, 0, None)
