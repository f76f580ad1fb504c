"""Commands about nodes. Those with agents are in tests/process/test_agents.py."""

from __future__ import annotations

import grp
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from insitu.access import is_shared
from insitu.cli import build_app, nodes
from insitu.errors import InputError
from insitu.grid import load_topology
from insitu.paths import Paths
from insitu.service.nodes import _AGENT_FIELDS


def run(*arguments: str) -> Any:
    """Runs a command in this process; errors of insitu are raised."""
    result = typer.testing.CliRunner().invoke(build_app(), arguments, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_nodes_stay_when_a_home_is_shared(home: Path) -> None:
    paths = Paths(home)
    nodes.up(nodes=3)
    nodes.up(shared=grp.getgrgid(os.getgid()).gr_name)
    assert is_shared(home) and len(load_topology(paths).nodes) == 3
    nodes.up(private=True)
    assert not is_shared(home) and len(load_topology(paths).nodes) == 3
    with pytest.raises(InputError, match="exclude each other"):
        nodes.up(shared="root", private=True)


def test_simulated_nodes_have_no_host(home: Path) -> None:
    run("up", "--nodes", "2")
    listed = json.loads(run("nodes", "--json").stdout)
    assert [each["node"] for each in listed] == ["node-0", "node-1"]
    assert {each[name] for each in listed for name in _AGENT_FIELDS} == {None}
    assert run("nodes").stdout.split()[:6] == ["NODE", "PRIMARIES", "BACKUPS", "ROWS", "SIZE", "STORE"]
