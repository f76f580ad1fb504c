"""Processes for further replicas: what they run, and what is reported of one that ended."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from insitu import ports
from insitu.errors import TrainingError
from insitu.train.devices import replica_processes
from insitu.train.devices.replica_processes import ReplicaMonitor, ReplicaProcesses, can_start_replicas


@pytest.fixture
def run_as_script(monkeypatch: pytest.MonkeyPatch):
    """Lets this process seem to run a script with arguments."""

    def as_script(path: Path, *arguments: str) -> None:
        main = ModuleType("__main__")
        main.__file__ = str(path)
        main.__spec__ = None
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, path.name, *arguments])

    return as_script


def test_replicas_run_the_same_command_by_its_absolute_path(tmp_path: Path, run_as_script, monkeypatch):
    script = tmp_path / "train.py"
    run_as_script(script, "--epochs", "3")
    assert can_start_replicas()
    assert replica_processes._command() == [sys.executable, str(script), "--epochs", "3"]
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", "pass"])
    assert not can_start_replicas()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("'no memory left'", r"replica on cpu:1.*exited with code 1[\s\S]*no memory left"),
        ("0", r"exited with code 0 before training was over\. .* evaluate and predict in all processes"),
    ],
)
def test_a_replica_that_ends_is_named_with_its_last_lines(
    tmp_path: Path, run_as_script, monkeypatch, end: str, told: str
):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nsys.exit({end})\n")
    run_as_script(script)
    monkeypatch.setattr(replica_processes.atexit, "register", lambda function: None)
    monkeypatch.setattr(ports, "_inherited", {})
    processes = ReplicaProcesses(["cpu:0", "cpu:1"])
    monkeypatch.setattr(replica_processes, "_replica_processes", processes)
    try:
        with pytest.raises(TrainingError, match=told):
            ReplicaMonitor().check_after_loss()
    finally:
        processes._end()
        for held in ports._inherited.values():
            held.close()
    ReplicaMonitor().check()
