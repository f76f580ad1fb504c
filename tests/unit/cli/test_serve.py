"""`insitu serve` finds the model, and lets in nobody whom the user didn't mean."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import command_line
import pytest
from published_models import publish_models

from insitu.base.errors import InputError
from insitu.cli import serve as command
from insitu.extensions import exports
from insitu.extensions.exports import Served

run = functools.partial(command_line.run, "serve")


@pytest.fixture
def trusted() -> list[bool]:
    """Whether each model that is loaded is trusted."""
    return []


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, trusted: list[bool]) -> list[Any]:
    """What the server is given, in place of which nothing runs."""
    found: list[Any] = []

    def note(name: str, holder: Any, options: Any, notify: Any, **more: Any) -> None:
        found.append((name, holder, options, more))

    monkeypatch.setattr(exports, "serve_model", note, raising=False)

    def load(path: Path, version: int, trust: bool) -> Served:
        trusted.append(trust)
        return Served(version, path)

    monkeypatch.setattr(command, "_load", load)
    return found


def test_a_file_and_the_exports_of_a_job_are_served(home: Path, tmp_path: Path, served: list[Any]) -> None:
    job = publish_models(home)
    (tmp_path / "people.keras").touch()
    run(str(tmp_path / "people.keras"), "--port", "0")
    run("people", "--name", "m")
    run("people", "--best", "--reload")
    (file, newest, best) = served
    assert file[0] == "people" and file[1].served.version == 1
    assert (newest[0], newest[1].served.version) == ("m", 300)
    newest[1].look()  # without --reload
    assert best[1].served.version == 200
    (job.exports / "best" / "00000500.keras").touch()
    best[1].look()
    newest[1].look()
    assert (best[1].served.version, newest[1].served.version) == (500, 300)
    assert best[1].served.model == job.exports / "best" / "00000500.keras"


def test_code_in_a_model_is_trusted_only_when_that_is_said(
    home: Path, tmp_path: Path, served: list[Any], trusted: list[bool]
) -> None:
    publish_models(home)
    (tmp_path / "people.keras").touch()
    for model in (str(tmp_path / "people.keras"), "people"):
        run(model)
        run(model, "--trust")
    assert trusted == [False, True, False, True]


def test_other_addresses_need_a_token_that_only_its_owner_reads(tmp_path: Path, served: list[Any]) -> None:
    model, token = tmp_path / "m.keras", tmp_path / "token"
    model.touch()
    with pytest.raises(InputError, match="--token FILE"):
        run(str(model), "--host", "0.0.0.0")
    for text, mode, error in (
        (None, 0o600, "No such file"),
        ("a" * 32, 0o644, "chmod 600"),
        ("short", 0o600, "16 to 4096 visible"),
        ("a" * 16 + " b", 0o600, "16 to 4096 visible"),
    ):
        if text is not None:
            token.write_text(text)
            token.chmod(mode)
        with pytest.raises(InputError, match=error):
            run(str(model), "--token", str(token))
    token.write_text("a" * 32 + "\n")
    with pytest.raises(InputError, match="needs TLS"):
        run(str(model), "--host", "0.0.0.0", "--token", str(token))
    assert served == []
    run(str(model), "--host", "0.0.0.0", "--token", str(token), "--self-signed")
    assert served[0][3]["token"] == "a" * 32


def test_options_of_jobs_and_names_that_cannot_be_are_refused(
    home: Path, tmp_path: Path, served: Any
) -> None:
    publish_models(home)
    (tmp_path / "m.keras").touch()
    with pytest.raises(InputError, match="said of a job"):
        run(str(tmp_path / "m.keras"), "--best")
    with pytest.raises(InputError, match="--best names an exporter too"):
        run("people", "--best", "--exporter", "final")
    with pytest.raises(InputError, match="part of an address"):
        run("people", "--name", "a/b")
