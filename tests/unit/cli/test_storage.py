"""`insitu quota`, and what other commands show of the room of stores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from old_second_path import move_there, set_second_path

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cli.storage import parse_size
from insitu.grid import Catalog, bring_up, import_cache


@pytest.fixture
def paths(home: Path, tmp_path: Path) -> Paths:
    """Two nodes with a cache."""
    np.save(tmp_path / "a.npy", np.arange(10_000))
    paths = Paths(home)
    bring_up(paths, 2)
    import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=2)
    return paths


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("1000B", 1000),
        ("200GB", 200 * 10**9),
        (" 1.5 TiB ", 3 * 2**39),
        ("7kb", 7000),
        ("0.5MB", 500_000),
        ("2PB", 2 * 10**15),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GB", "1XB", "1iB", "1e9", "12 apples", "1GB2", "nan", "²"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match=r"200GB .*200GiB"):
        parse_size(text)


def test_a_quota_is_set_shown_and_taken_away(paths: Paths) -> None:
    assert run("quota").stdout.splitlines()[0].split() == ["NODE", "USED", "QUOTA", "FREE"]
    assert "-" in run("quota").stdout
    shown = run("quota", "node-0", "1GB")
    assert "node-0 holds" in shown.stderr and "of 1.0 GB" in shown.stderr
    first, second = json.loads(run("quota", "--json").stdout)
    assert first["node"] == "node-0" and first["quota"] == 10**9 == first["used"] + first["free"]
    assert second["quota"] is None is second["free"]
    listed = run("nodes")
    assert "QUOTA" in listed.stdout and "1.0 GB" in listed.stdout
    assert "no quota" in run("quota", "node-0", "none").stderr
    assert "QUOTA" not in run("nodes").stdout


def test_a_quota_below_what_is_there_says_so(paths: Paths) -> None:
    shown = run("quota", "node-1", "1kB").stderr
    assert "more than its quota of 1.0 kB. Nothing is removed" in shown and "insitu delete CACHE" in shown
    (found,) = json.loads(run("quota", "node-1", "--json").stdout)
    assert found["free"] < 0


def test_up_sets_all_nodes_and_keeps_their_number(paths: Paths) -> None:
    shown = run("up", "--quota", "1GB").stderr
    assert "2 nodes up" in shown and "node-1 holds" in shown
    listed = json.loads(run("nodes", "--json").stdout)
    assert [n["quota"] for n in listed] == [10**9] * 2
    assert "has no quota" in run("up", "--quota", "none").stderr
    listed = json.loads(run("nodes", "--json").stdout)
    assert [n["quota"] for n in listed] == [None] * 2
    with pytest.raises(InputError, match="A size is"):
        run("up", "--nodes", "3", "--quota", "much")
    assert len(json.loads(run("nodes", "--json").stdout)) == 2, "nothing was done"


def test_up_names_the_second_paths_of_an_earlier_version(paths: Paths, tmp_path: Path) -> None:
    root = set_second_path(paths, tmp_path / "slow")
    move_there(paths, root, Catalog(paths).get("a"))
    shown = run("up", "--nodes", "2").stderr
    assert f"node-0 has a second path, {root}" in shown and "insitu repair" in shown
    assert "node-1 has" not in shown
    for option in (["--private"], ["--shared", "team"]):
        with pytest.raises(InputError, match=rf"Received: a second path, {root}.*insitu repair"):
            run("up", *option)
    repaired = run("repair")
    assert "1 partition of node-0 came back from its second path into its store." in repaired.stderr
    assert repaired.exit_code == 0 and "second path" not in run("up", "--nodes", "2").stderr
    assert run("repair", "--json").exit_code == 0


def test_a_repair_that_leaves_partitions_there_exits_with_1(paths: Paths, tmp_path: Path) -> None:
    root = set_second_path(paths, tmp_path / "slow", quota=1000)
    move_there(paths, root, Catalog(paths).get("a"))
    repaired = run("repair")
    assert repaired.exit_code == 1 and "0 partitions of node-0 came" in repaired.stderr
    assert "1 stays there" in repaired.stderr and "insitu quota node-0 SIZE" in repaired.stderr
    repaired = run("repair", "--json")
    assert repaired.exit_code == 1
    assert json.loads(repaired.stdout)["brought_back"] == {"node-0": {"moved": 0, "left": 1}}


def test_a_quota_is_that_of_a_node(paths: Paths) -> None:
    with pytest.raises(InputError, match=r"one of node-0, node-1. Received: node-7"):
        run("quota", "node-7", "1GB")


def test_the_host_of_an_agent_has_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no list of nodes: the store says whose it is."""
    paths = Paths(tmp_path / "agent")
    paths.node("fast").mkdir(parents=True)
    paths.home.chmod(0o700)
    paths.agent("fast").write_text("{}")
    monkeypatch.setenv("INSITU_HOME", str(paths.home))
    run("quota", "fast", "1GB")
    (shown,) = json.loads(run("quota", "--json").stdout)
    assert (shown["node"], shown["quota"]) == ("fast", 10**9)
    with pytest.raises(InputError, match=r"NODE is one of fast. Received: node-0"):
        run("quota", "node-0", "1GB")
