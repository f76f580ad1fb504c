"""A script that would serve in a task runs again there, as the coordinator."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from insitu.base.context import context
from insitu.base.errors import TrainingError
from insitu.train.parameter_server.script_server import Server, coordinator_environment

CONFIG = {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "worker", "index": 1}}
SCRIPT = """
import json, os, pathlib, sys
task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
if task == "worker" or "serve" in sys.argv:
    from insitu.train.parameter_server.script_server import Server
    Server(start=True).join()
pathlib.Path(__file__).with_name("ran").write_text(f"{__name__} as {task}")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TF_CONFIG", json.dumps(CONFIG))
    monkeypatch.setenv("INSITU_TASK", "worker:1")
    monkeypatch.setenv("INSITU_JOB_ID", "a-job")
    monkeypatch.setenv("INSITU_SCRIPT_RUNS_AGAIN", "")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(path)])
    return path


def test_join_runs_the_script_as_the_coordinator_and_ends(script: Path) -> None:
    assert Server().target == "grpc://b:1"
    with pytest.raises(SystemExit) as ended:
        Server().join()
    assert ended.value.code == 0
    assert script.with_name("ran").read_text() == "__main__ as chief"
    assert str(context().task) == "worker:1" and context().servers == ("c:1",)


def test_a_script_that_serves_again_is_refused(script: Path) -> None:
    sys.argv.append("serve")
    with pytest.raises(TrainingError, match="another join in that run"):
        Server().join()
    assert not script.with_name("ran").exists()


def test_without_a_cluster_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    Server().start()
    assert Server().target == ""
    with pytest.raises(TrainingError, match="a process outside of a job"):
        Server().join()


def test_only_the_task_changes() -> None:
    changed = coordinator_environment(json.dumps(CONFIG), "worker:1")
    assert json.loads(changed["TF_CONFIG"])["cluster"] == CONFIG["cluster"]
    assert changed["INSITU_TASK"] == "worker:1" and set(changed) <= {*changed, *os.environ}
