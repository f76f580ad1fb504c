"""`insitu examples`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from insitu.cli import build_app


def run(*arguments: str) -> str:
    app: Any = build_app()
    done = CliRunner().invoke(app, ["examples", *arguments])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_each_example_is_printed_with_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run()
    assert "insitu import --label-from-filename --split train=0.9,test=0.1 quickdraw FOLDER" in said
    assert "--ps 2 quickdraw/train" in said and "insitu start --workers 2 - " in said
    assert json.loads(run("--json"))[0]["name"] == "stripes"
    monkeypatch.setattr("insitu.service.examples.find_examples", lambda: None)
    assert json.loads(run("--json")) == []
