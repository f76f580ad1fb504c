"""`insitu examples`."""

from __future__ import annotations

import json

import pytest
from command_line import CliRunner


def run(*arguments: str) -> str:
    done = CliRunner().run(["examples", *arguments])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_each_example_is_printed_with_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run()
    assert "insitu import --label-from-filename --split train=0.9,test=0.1 quickdraw FOLDER" in said
    assert "--ps 2 quickdraw/train" in said and "insitu start --workers 2 - " in said
    assert json.loads(run("--json"))[0]["name"] == "stripes"
    monkeypatch.setattr("insitu.service.examples.find_examples", lambda: None)
    assert json.loads(run("--json")) == []
