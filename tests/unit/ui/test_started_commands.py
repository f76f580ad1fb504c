"""Imports that the page starts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.ui.started_commands import StartedCommands


def test_an_import_is_a_process_whose_output_is_text(tmp_path: Path) -> None:
    commands = StartedCommands({**os.environ, "INSITU_HOME": str(tmp_path)})
    done = threading.Event()
    started = commands.start_import("a", ["--nothing-\x1b[2J.npy"], ["--partitions=2"], done.set)
    assert started["state"] == "running" and "import --partitions=2 -- a " in started["command_line"]
    assert done.wait(100)
    found = commands.find_import(started["import"])
    assert found is not None and found["state"] == "failed" and found["exit_code"] == 2
    assert "nothing" in " ".join(found["output"]) and all(line.isprintable() for line in found["output"])
    assert [each["import"] for each in commands.list()] == [started["import"]]
    assert commands.find_import("nothing") is None
    commands.close()


def test_commands_of_pages_are_no_imports(tmp_path: Path) -> None:
    commands = StartedCommands({**os.environ, "INSITU_HOME": str(tmp_path)})
    done = threading.Event()
    commands.start("k8s", "up", ["--version"], done.set)
    assert done.wait(100) and commands.list() == []
    (found,) = commands.list("k8s")
    assert commands.find_import(found["import"]) is None
    assert (found["state"], found["command_line"]) == ("finished", "insitu --version")
    commands.close()


def test_few_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = StartedCommands(os.environ)
    monkeypatch.setattr("insitu.ui.started_commands._AT_ONCE", 0)
    with pytest.raises(InputError, match="at a time"):
        commands.start_import("a", ["b"], [], lambda: None)
