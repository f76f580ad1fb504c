"""`insitu quota`, `insitu tier`, and what other commands show of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing

from insitu.cli import build_app
from insitu.cli.storage import parse_size
from insitu.errors import InputError, UnknownCache
from insitu.grid import bring_up, import_cache
from insitu.paths import Paths


def run(*arguments: str) -> Any:
    result = typer.testing.CliRunner().invoke(build_app(), arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def paths(home: Path, tmp_path: Path) -> Paths:
    """Two nodes with a cache, and a folder for a second path."""
    np.save(tmp_path / "a.npy", np.arange(10_000))
    (tmp_path / "slow").mkdir()
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
    assert "QUOTA" in listed.stdout and "1.0 GB" in listed.stdout and "SLOW" not in listed.stdout
    assert "no quota" in run("quota", "node-0", "none").stderr
    assert "QUOTA" not in run("nodes").stdout


def test_a_quota_below_what_is_there_says_so(paths: Paths) -> None:
    shown = run("quota", "node-1", "1kB").stderr
    assert "more than its quota of 1.0 kB. Nothing is removed" in shown and "insitu delete CACHE" in shown
    assert "insitu tier" not in shown, "there is no second path to move caches to"
    (found,) = json.loads(run("quota", "node-1", "--json").stdout)
    assert found["free"] < 0


def test_up_sets_all_nodes_and_keeps_their_number(paths: Paths, tmp_path: Path) -> None:
    shown = run("up", "--quota", "1GB", "--tier", str(tmp_path / "slow")).stderr
    assert "2 node(s) up" in shown and "node-1 holds" in shown
    assert shown.count("on the same device as the store") == 2
    listed = json.loads(run("nodes", "--json").stdout)
    assert [n["quota"] for n in listed] == [10**9] * 2
    assert all(Path(n["slow"]).parent == tmp_path / "slow" for n in listed)
    assert "has no second path" in run("up", "--tier", "none", "--quota", "none").stderr
    listed = json.loads(run("nodes", "--json").stdout)
    assert [(n["quota"], n["slow"], n["slow_bytes"]) for n in listed] == [(None, None, 0)] * 2
    with pytest.raises(InputError, match="A size is"):
        run("up", "--nodes", "3", "--quota", "much")
    assert len(json.loads(run("nodes", "--json").stdout)) == 2, "nothing was done"


def test_a_cache_moves_there_and_back(paths: Paths, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"node-0, node-1, which have none"):
        run("tier", "a", "--to", "slow")
    run("up", "--tier", str(tmp_path / "slow"))
    assert "1 partition(s) of node-1" in run("tier", "a", "--to", "slow", "--node", "node-1").stdout
    described = run("describe", "a").stdout
    assert "ON SLOW PATH" in described and described.splitlines()[-1].endswith("node-1")
    partitions = json.loads(run("describe", "a", "--json").stdout)["partition_list"]
    assert [p["slow"] for p in partitions] == [[], ["node-1"]]
    assert "ON SLOW PATH" in run("nodes").stdout
    _, second = json.loads(run("nodes", "--json").stdout)
    assert second["slow_bytes"] == partitions[1]["bytes"] == second["bytes"]
    (first, _) = json.loads(run("tier", "a", "--to", "slow", "--json").stdout)
    assert first == {
        "node": "node-0",
        "version": 1,
        "partitions": 1,
        "bytes": partitions[0]["bytes"],
        "to": "slow",
    }
    assert "lay there already" in run("tier", "a", "--to", "slow").stderr
    assert run("tier", "a", "--to", "fast").stdout.count("moved to the fast path") == 2
    assert "SLOW" not in run("describe", "a").stdout


def test_what_cannot_be_moved(paths: Paths) -> None:
    with pytest.raises(InputError, match=r"slow or fast. Received: cold"):
        run("tier", "a", "--to", "cold")
    with pytest.raises(UnknownCache):
        run("tier", "b", "--to", "slow")
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
