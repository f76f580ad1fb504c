"""What an agent says about its host."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from insitu.base._version import __version__
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.wire import facts
from insitu.cluster.wire.messages import parse_facts, parse_load

NODE = NodeId("a")


def test_what_is_found_out_can_be_sent(home: Path) -> None:
    paths = Paths(home)
    paths.node(NODE).mkdir(parents=True)
    home.chmod(0o700)
    made = facts.gather_facts(paths, NODE, "10.0.0.1", 7, "PEM")
    assert parse_facts(json.loads(json.dumps(asdict(made)))) == made
    assert made.cores >= 1 and made.memory > 0 and made.disk > 0 and len(made.store) == 32
    load = facts.measure_load(paths, NODE, 2)
    assert parse_load(json.loads(json.dumps(asdict(load)))) == load and load.unknown_versions == 2


def test_versions_are_those_that_must_be_equal() -> None:
    found = facts.read_versions()
    assert found["insitu"] == __version__ and found["python"].count(".") == 1
    assert {"keras", "numpy"} <= found.keys() and not any("+" in version for version in found.values())


def test_gpus_are_those_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_NVIDIA", tmp_path / "none")
    assert facts.list_gpus() == ()
    for number in range(2):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   1\n")
    (tmp_path / "0000:09:00.0").mkdir()
    monkeypatch.setattr(facts, "_NVIDIA", tmp_path)
    assert facts.list_gpus() == ("NVIDIA H200", "NVIDIA H200")
