"""Agents and a head as processes, on the loopback interface. tests/fault/test_hosts.py has some on hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_hosts import INSITU, LoopbackHosts, insitu, is_running, wait_until

from insitu.cluster.agents import records
from insitu.cluster.agents.hosts import read_nodes
from insitu.grid import Catalog, import_cache
from insitu.grid.transfer import ServerAddress, fetch_partition
from insitu.paths import Paths
from insitu.spec import NodeId, PlacedCopy


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[LoopbackHosts]:
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b"))) as found:
        yield found


def test_agents_come_up_serve_a_copy_of_the_catalogue_and_end(hosts: LoopbackHosts, tmp_path: Path) -> None:
    said = hosts.up().stderr
    assert "2 of 2 host(s) up. The head is at 127.0.0.1:" in said and "a serves at 127.0.0.1:" in said
    found = hosts.nodes()
    assert {n: (f["state"], f["host"]) for n, f in found.items()} == {
        n: ("alive", socket.gethostname()) for n in ("a", "b")
    }
    assert found["a"]["cores"] >= 1 and found["a"]["disk_free"] > 0 and found["a"]["versions"]["python"]
    assert found["a"]["store"] == str(Paths(hosts.homes["a"]).node("a"))
    assert hosts.nodes(hosts.homes["b"]).keys() == found.keys()
    assert "ADDRESS" in insitu(hosts.head, "nodes").stdout
    assert "a runs already" in hosts.up().stderr

    # The catalogue of the head reaches the agents, where nobody changes it.
    np.save(tmp_path / "x.npy", np.arange(100))
    insitu(hosts.head, "import", "digits", str(tmp_path / "x.npy"))
    there = hosts.homes["a"]
    wait_until(lambda: [c.name for c in Catalog(Paths(there)).caches()] == ["digits"], "a copy")
    assert json.loads(insitu(there, "caches", "--json").stdout)[0]["rows"] == 100
    refused = insitu(there, "import", "more", str(tmp_path / "x.npy"), code=1).stderr
    assert "The head alone changes the catalogue" in refused
    assert "The head alone" in insitu(there, "down", "--force", code=1).stderr

    pids = [hosts.agent_pid(name) for name in hosts.homes]
    pids.append(records.read_head(Paths(hosts.head)).pid)  # type: ignore[union-attr]
    stores = {n: f["store_id"] for n, f in found.items()}
    assert "2 agent(s) ended, whose stores stay: a, b" in insitu(hosts.head, "down").stderr
    assert not [pid for pid in pids if is_running(pid)]

    # They come back with what they hold, and go as a whole with --force.
    hosts.up()
    assert {n: f["store_id"] for n, f in hosts.nodes().items() if f["state"]} == stores
    insitu(hosts.head, "down", "--force")
    assert [list(Paths(home).nodes.iterdir()) for home in hosts.homes.values()] == [[], []]
    assert not any(Paths(home).token.exists() for home in (hosts.head, *hosts.homes.values()))
    assert insitu(hosts.head, "nodes", "--json").stdout.count('"node"') == 1


@pytest.mark.hosts
def test_a_killed_agent_is_lost_and_comes_back_and_so_does_the_head(hosts: LoopbackHosts) -> None:
    hosts.up()
    stores = {n: f["store_id"] for n, f in hosts.nodes().items()}
    os.kill(hosts.agent_pid("a"), signal.SIGKILL)
    wait_until(lambda: hosts.states() == {"a": "lost", "b": "alive"}, "the loss")
    hosts.up()
    assert hosts.states() == {"a": "alive", "b": "alive"}

    before = records.read_head(Paths(hosts.head))
    assert before is not None
    agents = [hosts.agent_pid(name) for name in ("a", "b")]
    os.kill(before.pid, signal.SIGKILL)
    # Without a head its home says what it knew, and agents live on.
    wait_until(lambda: hosts.states() == {"a": "unknown", "b": "unknown"}, "the end of the head")
    assert "must be reachable" in insitu(hosts.homes["a"], "nodes", code=1).stderr
    hosts.up()
    wait_until(lambda: hosts.states() == {"a": "alive", "b": "alive"}, "agents that dial the new head")
    after = records.read_head(Paths(hosts.head))
    assert after is not None and after.epoch == before.epoch + 1 and after.address == before.address
    assert [hosts.agent_pid(name) for name in ("a", "b")] == agents
    assert {n: f["store_id"] for n, f in hosts.nodes().items()} == stores


def agent(home: Path, head: str, *options: str, token: str, code: int = 1) -> str:
    """What `insitu agent --detach` says."""
    options = ("--detach", "--token-stdin", "--head", head, *options)
    return insitu(home, "agent", *options, given=f"{token}\n", code=code).stderr


def test_what_cannot_join_is_refused_by_a_clear_error(hosts: LoopbackHosts, tmp_path: Path) -> None:
    hosts.up()
    paths, other = Paths(hosts.head), tmp_path / "c"
    record, token = records.read_head(paths), records.read_token(paths)
    assert record is not None
    head = record.address
    assert "has another token than this machine" in agent(other, head, token="x" * 32)
    assert "16 characters at least" in agent(other, head, token="x", code=2)
    assert "must be reachable" in agent(other, "no.such.host.invalid:1", token=token)
    assert "an address is host:port" in agent(other, "head", token=token, code=2).lower()
    assert "--interface names an interface of this machine" in agent(
        other, head, "--interface", "10.99.99.99", token=token
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = agent(other, head, "--port", str(port), token=token)
        assert f"Received: 127.0.0.1:{port} (Address already in use)" in said
    versions = "import insitu._version as v; v.__version__ = '9.9'; from insitu.cli import main; main()"
    arguments = ("--token-stdin", "--head", head, "--name", "c")
    old = subprocess.run(
        [sys.executable, "-c", versions, "agent", *arguments],
        env={**os.environ, "INSITU_HOME": str(other)},
        input=f"{token}\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert old.returncode == 1 and "has insitu 9.9 instead of" in old.stderr
    # One store, one agent; one store, one cluster.
    assert "A store has one agent" in agent(hosts.homes["a"], "127.0.0.1:1", "--name", "a", token=token)
    (tmp_path / "second").mkdir()
    second = LoopbackHosts(tmp_path / "second", ())
    second.file.write_text(f"127.0.0.1 home={hosts.homes['a']}\n")
    try:
        said = second.up(code=1).stderr
        assert f"for the head at {head}" in said and "127.0.0.1 didn't" in said
    finally:
        insitu(second.head, "down", code=None)
    assert hosts.states() == {"a": "alive", "b": "alive"}


def test_a_copy_of_a_disk_is_refused(hosts: LoopbackHosts, tmp_path: Path) -> None:
    hosts.up()
    paths = Paths(hosts.head)
    record, token = records.read_head(paths), records.read_token(paths)
    assert record is not None
    shutil.copytree(Paths(hosts.homes["a"]).node("a"), Paths(tmp_path / "copy").node("z"))
    (tmp_path / "copy").chmod(0o700)
    said = agent(tmp_path / "copy", record.address, token=token)
    assert "Each store has one agent" in said and "If one disk is a copy of the other" in said


def held_copies(paths: Paths) -> dict[tuple[int, str], str]:
    return {(c.partition, str(c.node)): c.state for c in Catalog(paths).placement("digits", 1)}


@pytest.mark.hosts
def test_a_store_that_returns_is_compared_with_the_catalogue(hosts: LoopbackHosts, tmp_path: Path) -> None:
    """Files that are not there any more are lost copies, and live again once they are back."""
    paths, there = Paths(hosts.head), Paths(hosts.homes["a"])
    np.save(tmp_path / "x.npy", np.arange(100))
    (cache,) = import_cache(paths, "digits", [str(tmp_path / "x.npy")], partitions=2)
    hosts.up()
    version = there.version("a", "digits", 1)
    shutil.copytree(paths.version("node-0", "digits", 1), version)
    Catalog(paths).change_placement(
        "digits", 1, lambda copies: [*copies, *(PlacedCopy(c.partition, NodeId("a")) for c in copies)]
    )
    assert hosts.nodes()["a"]["backups"] == 2

    # Another node fetches from it what it serves, with what the head says about it.
    (member,) = [m for m in read_nodes(paths)[0] if m.facts.node == "a"]
    source = ServerAddress(member.facts.address, member.facts.port, member.facts.certificate)
    other = Paths(tmp_path / "reader")
    token = records.read_token(paths).encode()
    fetched = fetch_partition(other, NodeId("r"), cache, 1, [source], token)
    assert fetched.read_bytes() == paths.partition("node-0", "digits", 1, 1).read_bytes()

    insitu(hosts.head, "down")
    moved = version.with_name("aside")
    there.partition("a", "digits", 1, 1).rename(moved)
    hosts.up()
    wait_until(lambda: held_copies(paths)[1, "a"] == "lost", "the loss in the catalogue")
    assert held_copies(paths) == {
        (0, "node-0"): "live",
        (1, "node-0"): "live",
        (0, "a"): "live",
        (1, "a"): "lost",
    }
    insitu(hosts.head, "down")
    moved.rename(there.partition("a", "digits", 1, 1))
    hosts.up()
    wait_until(lambda: held_copies(paths)[1, "a"] == "live", "its return")


@pytest.mark.hosts
def test_hosts_that_fail_are_named_and_the_others_stay_up(hosts: LoopbackHosts) -> None:
    with hosts.file.open("a") as file:
        file.write("no.such.host.invalid name=c port=1\n")
    launcher = "sh -c 'case {host} in 127.*) exec sh -c \"$0\";; esac; echo no route to {host} >&2; exit 255'"
    done = insitu(
        hosts.head, "up", "--hosts", str(hosts.file), "--launcher", launcher, "--insitu", INSITU, code=1
    )
    assert "no.such.host.invalid: failed: no route to no.such.host.invalid" in done.stderr
    assert "2 of 3 host(s) up" in done.stderr and "Received: no.such.host.invalid didn't" in done.stderr
    assert hosts.states() == {"a": "alive", "b": "alive"}
    insitu(hosts.head, "down")  # asks nothing of a host where nothing was started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--hosts", "nowhere.txt"], "--hosts names a file with a host a line. Received: nowhere.txt"),
        (["up", "--hosts", "x", "--nodes", "2"], "--hosts excludes what is about this machine alone"),
        (["up", "--launcher", "x"], "go with --hosts. Received: --launcher without it"),
        (["agent"], "An agent needs a head to join"),
        (["agent", "--delete"], "--delete without --stop"),
        (["agent", "--head", "h:1"], "The cluster's token must be in"),
    ],
)
def test_options_that_do_not_fit_are_refused(home: Path, arguments: list[str], message: str) -> None:
    assert message in " ".join(insitu(home, *arguments, code=2).stderr.split())


@pytest.mark.hosts
def test_an_agent_in_the_foreground_ends_by_a_signal(hosts: LoopbackHosts, tmp_path: Path) -> None:
    """As under a scheduler."""
    hosts.up()
    record = records.read_head(Paths(hosts.head))
    assert record is not None
    shutil.copy(Paths(hosts.head).token, tmp_path / "token")
    environment: dict[str, Any] = {**os.environ, "INSITU_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "insitu", "agent", "--head", record.address, "--name", "c"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        joined = json.loads(process.stdout.readline())
        assert joined["node"] == "c" and hosts.states()["c"] == "alive"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until(lambda: hosts.states()["c"] == "left", "the farewell")
