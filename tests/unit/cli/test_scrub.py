"""`insitu scrub`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner

from insitu.base.errors import CorruptPartition, InputError
from insitu.base.paths import Paths
from insitu.grid import bring_up, import_cache


def run(*arguments: str) -> Any:
    return CliRunner().run(["scrub", *arguments])


@pytest.fixture
def partition(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first copy of the one partition of cache a."""
    monkeypatch.setattr("os.nice", lambda priority: None)
    bring_up(Paths(home), 2)
    np.save(tmp_path / "a.npy", np.arange(1000))
    import_cache(Paths(home), "a", [str(tmp_path / "a.npy")], partitions=1, backups=1)
    return Paths(home).partition("node-0", "a", 1, 0)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_good_cache(partition: Path) -> None:
    found = run("a")
    assert found.exit_code == 0 and "2 files of a version 1" in found.stdout
    assert "all as they were written" in found.stdout


def test_damage_is_the_error_unless_it_is_repaired(partition: Path) -> None:
    damage(partition)
    found = run("a", "--json")
    assert isinstance(found.exception, CorruptPartition) and found.exception.exit_code == 1
    first, second = json.loads(found.stdout)["copies"]
    assert (first["node"], first["blocks"], first["repaired"]) == ("node-0", [0], False)
    assert str(partition) in first["problem"] and second["problem"] is None
    found = run("a", "--repair")
    assert found.exit_code == 0 and "1 damaged" in found.stdout
    assert run("a").exit_code == 0


def test_a_rate_is_positive(partition: Path) -> None:
    found = run("a", "--rate", "0")
    assert isinstance(found.exception, InputError) and "Received: 0" in str(found.exception)
