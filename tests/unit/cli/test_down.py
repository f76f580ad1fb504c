"""`insitu down`, in words and as JSON. Agents that really run are ended in tests/process/test_agents.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner

from insitu.cluster import DownReport


def run(*arguments: str) -> Any:
    return CliRunner().run(arguments)


def make_home(folder: Path) -> None:
    np.save(folder / "x.npy", np.arange(9))
    run("up", "--nodes", "2")
    assert run("import", "a", str(folder / "x.npy")).exit_code == 0


def test_what_was_deleted_is_said(home: Path, tmp_path: Path) -> None:
    make_home(tmp_path)
    said = run("down", "--force").stderr
    assert said == "2 nodes down, and their stores deleted: node-0, node-1\n1 cache deleted: a\n"


def test_what_was_deleted_is_said_as_json(home: Path, tmp_path: Path) -> None:
    make_home(tmp_path)
    done = run("down", "--force", "--json")
    wanted = {"agents": [], "left": {}, "nodes": ["node-0", "node-1"], "jobs": [], "caches": ["a"]}
    assert (json.loads(done.stdout), done.stderr) == (wanted, "")


@pytest.mark.parametrize("options", [(), ("--force",)])
def test_agents_that_may_still_run_are_named_and_nothing_else_is_deleted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    make_home(tmp_path)
    monkeypatch.setattr("insitu.cluster.read_head", lambda paths: object())
    report = DownReport(("a",), {"10.0.0.2": "no answer"})
    monkeypatch.setattr("insitu.cluster.take_down_cluster", lambda paths, **named: report)
    done = run("down", "--json", *options)
    wanted = {"agents": ["a"], "left": {"10.0.0.2": "no answer"}, "nodes": [], "jobs": [], "caches": []}
    assert json.loads(done.stdout) == wanted
    assert "10.0.0.2: no answer" in done.stderr and "can't be reached" in str(done.exception)
    assert " ended: " not in done.stderr and "1 agent ended" in run("down", *options).stderr
    assert [each["name"] for each in json.loads(run("caches", "--json").stdout)] == ["a"]
