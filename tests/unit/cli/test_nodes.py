"""Commands about nodes. Those with agents are in tests/process/test_agents.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run
from foreign_user import name_own_group

from insitu.base.disk.access import is_shared
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cli import nodes
from insitu.cli.hosts import parse_times
from insitu.grid import load_topology
from insitu.service.nodes import _AGENT_FIELDS


def test_nodes_stay_when_a_home_is_shared(home: Path) -> None:
    paths = Paths(home)
    nodes.up(nodes=3)
    nodes.up(shared=name_own_group())
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


def test_nodes_of_one_machine_have_no_network_to_check(home: Path) -> None:
    run("up", "--nodes", "2")
    assert "no network is between them" in run("nodes", "--check").stderr


def test_agents_that_were_ended_are_named_in_words_or_json(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("agent", "--stop").stderr == "No agent runs here.\n"
    run("up", "--nodes", "1")
    monkeypatch.setattr("insitu.cluster.stop_agents", lambda paths: ["node-0"])
    done = run("agent", "--stop")
    assert (done.stdout, done.stderr) == ("", "1 agent ended: node-0. Stores that stay: node-0.\n")
    said = json.loads(run("agent", "--stop", "--json").stdout)
    assert said == {"stopped": ["node-0"], "stores": ["node-0"]}
    assert run("agent", "--stop", "--delete").stderr == "1 agent ended: node-0. Stores deleted: node-0.\n"
    with pytest.raises(InputError, match="--json without --stop"):
        run("agent", "--json", "--head", "h:1")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--replace-head",), "--replace-head"),
        (("--hosts", "hosts.txt", "--head-only", "--replace-head"), "--head-only with --replace-head"),
        (("--hosts", "hosts.txt", "--copy-lost-after", "soon"), "--copy-lost-after"),
        (("--engine", "ray", "--replace-head"), "--engine ray with --replace-head"),
    ],
)
def test_a_time_without_a_head_that_cannot_be_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("10.0.0.1\n")
    with pytest.raises(InputError, match=why):
        run("up", *options)
    assert not Paths(home).head.exists()


def test_times_that_are_given_change_the_head_alone() -> None:
    assert parse_times({"--copy-lost-after": None}) == {}
    assert parse_times({"--copy-lost-after": "off"}) == {"copy_lost_after": None}
    assert parse_times({"--copy-lost-after": "1m"}) == {"copy_lost_after": 60.0}
