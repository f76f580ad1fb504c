"""Imports that the page starts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.ui.imports import Imports


def test_an_import_is_a_process_whose_output_is_text(tmp_path: Path) -> None:
    imports = Imports({**os.environ, "INSITU_HOME": str(tmp_path)})
    done = threading.Event()
    started = imports.start("a", ["--nothing-\x1b[2J.npy"], ["--partitions=2"], done.set)
    assert started["state"] == "running" and "import --partitions=2 -- a " in started["command_line"]
    assert done.wait(100)
    found = imports.find(started["import"])
    assert found is not None and found["state"] == "failed" and found["exit_code"] == 2
    assert "nothing" in " ".join(found["output"]) and all(line.isprintable() for line in found["output"])
    assert [each["import"] for each in imports.list()] == [started["import"]]
    assert imports.find("nothing") is None
    imports.close()


def test_commands_of_pages_are_no_imports(tmp_path: Path) -> None:
    imports = Imports({**os.environ, "INSITU_HOME": str(tmp_path)})
    done = threading.Event()
    imports.run("k8s", "up", ["--version"], done.set)
    assert done.wait(100) and imports.list() == []
    (found,) = imports.list("k8s")
    assert (found["state"], found["command_line"]) == ("finished", "insitu --version")
    imports.close()


def test_few_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Imports(os.environ)
    monkeypatch.setattr("insitu.ui.imports._AT_ONCE", 0)
    with pytest.raises(InputError, match="at a time"):
        imports.start("a", ["b"], [], lambda: None)
