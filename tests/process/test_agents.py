"""Agents and a head as processes, on the loopback interface. tests/fault/test_hosts.py has some on hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_hosts import INSITU, LoopbackHosts, insitu, is_running, wait_until

from insitu.base.paths import Paths
from insitu.base.spec import NodeId, PlacedCopy
from insitu.cluster.wire import records
from insitu.cluster.wire.node_list import read_nodes
from insitu.cluster.wire.saved_members import read_kept_members
from insitu.grid import Catalog, import_cache
from insitu.grid.catalog.orphaned_imports import host_mark
from insitu.grid.transfer import ServerAddress, fetch_partition


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[LoopbackHosts]:
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b"))) as found:
        yield found


def assert_asked_from_outside(hosts: LoopbackHosts, tmp_path: Path) -> None:
    """A machine that has only address and token has the head run commands."""
    record = records.read_head(Paths(hosts.head))
    assert record is not None
    home = tmp_path / "outside"
    by_option = ("--cluster", record.address)
    variables = {"INSITU_CLUSTER": record.address, "INSITU_TOKEN_FILE": str(Paths(hosts.head).token)}
    token = {"INSITU_TOKEN_FILE": variables["INSITU_TOKEN_FILE"]}
    for command in (("caches", "--json"), ("describe", "digits", "--verify"), ("ps", "--all")):
        here = insitu(hosts.head, *command)
        there = insitu(home, *by_option, *command, **token)
        assert (there.stdout, there.stderr) == (here.stdout, here.stderr), command
    listed = json.loads(insitu(home, "nodes", "--json", **variables).stdout)
    assert {n["node"]: n["state"] for n in listed} == {n: f["state"] for n, f in hosts.nodes().items()}
    failed = insitu(home, "describe", "more", code=None, **variables)
    assert failed.returncode == insitu(hosts.head, "describe", "more", code=None).returncode != 0
    assert "more" in failed.stderr and failed.stdout == ""
    assert "Received: up with" in insitu(home, *by_option, "up", code=2, **token).stderr
    (tmp_path / "other").write_text("x" * 32)
    (tmp_path / "other").chmod(0o600)
    token["INSITU_TOKEN_FILE"] = str(tmp_path / "other")
    assert "has another token" in insitu(home, *by_option, "caches", code=1, **token).stderr
    assert not home.exists()


@pytest.mark.long
def test_agents_come_up_serve_a_copy_of_the_catalogue_and_end(hosts: LoopbackHosts, tmp_path: Path) -> None:
    said = hosts.up().stderr
    assert "2 of 2 hosts up. The head is at 127.0.0.1:" in said and "a serves at 127.0.0.1:" in said
    found = hosts.nodes()
    assert {n: (f["state"], f["host"]) for n, f in found.items()} == {
        n: ("alive", socket.gethostname()) for n in ("a", "b")
    }
    assert found["a"]["cores"] >= 1 and found["a"]["disk_free"] > 0 and found["a"]["versions"]["python"]
    assert found["a"]["store"] == str(Paths(hosts.homes["a"]).node("a"))
    assert hosts.nodes(hosts.homes["b"]).keys() == found.keys()
    assert "ADDRESS" in insitu(hosts.head, "nodes").stdout

    # A stranger at the port of an agent leaves nothing in its log.
    host, _, port = found["a"]["address"].rpartition(":")
    with socket.create_connection((host, int(port)), 30) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(1) == b""
    assert "andshake" not in Paths(hosts.homes["a"]).agent_log("a").read_text()

    assert "a runs already" in hosts.up().stderr

    # The catalogue of the head reaches the agents, where nobody changes it.
    np.save(tmp_path / "x.npy", np.arange(100))
    insitu(hosts.head, "import", "digits", str(tmp_path / "x.npy"))
    there = hosts.homes["a"]
    wait_until(lambda: [c.name for c in Catalog(Paths(there)).caches()] == ["digits"], "a copy")
    assert json.loads(insitu(there, "caches", "--json").stdout)[0]["rows"] == 100
    assert "The head alone" in insitu(there, "down", "--force", code=1).stderr
    assert_asked_from_outside(hosts, tmp_path)

    pids = [hosts.agent_pid(name) for name in hosts.homes]
    pids.append(records.read_head(Paths(hosts.head)).pid)  # type: ignore[union-attr]
    stores = {n: f["store_id"] for n, f in found.items()}
    assert "2 agents ended, whose stores stay: a, b" in insitu(hosts.head, "down").stderr
    assert not [pid for pid in pids if is_running(pid)]

    # They come back with what they hold, and go as a whole with --force.
    hosts.up()
    assert {n: f["store_id"] for n, f in hosts.nodes().items() if f["state"]} == stores
    insitu(hosts.head, "down", "--force")
    assert [list(Paths(home).nodes.iterdir()) for home in hosts.homes.values()] == [[], []]
    assert not any(Paths(home).token.exists() for home in (hosts.head, *hosts.homes.values()))
    assert insitu(hosts.head, "nodes", "--json").stdout.count('"node"') == 1


def test_a_head_comes_up_alone_for_agents_that_others_start(hosts: LoopbackHosts) -> None:
    """As under a scheduler."""
    command = ("up", "--hosts", str(hosts.file), "--head-only")
    assert (
        "Received: --head-only with --launcher"
        in insitu(hosts.head, *command, "--launcher", "sh {host}", code=2).stderr
    )
    assert "--head-only" in insitu(hosts.head, "up", "--head-only", code=2).stderr
    nobody = str(int(Path("/proc/sys/kernel/pid_max").read_text()))
    assert f"Received: {nobody}." in insitu(hosts.head, *command, "--tied-to", nobody, code=2).stderr
    assert "Received: --tied-to without it" in insitu(hosts.head, "up", "--tied-to", "1", code=2).stderr
    address = insitu(hosts.head, *command).stdout.strip()
    assert address.startswith("127.0.0.1:") and hosts.states() == {}
    assert insitu(hosts.head, *command).stdout.strip() == address
    token = (hosts.head / "token").read_text()
    options = ("--name", "a", "--head", address)
    insitu(hosts.homes["a"], "agent", "--detach", "--token-stdin", *options, given=f"{token}\n")
    assert hosts.states() == {"a": "alive"}
    assert "1 agent ended, whose stores stay: a" in insitu(hosts.head, "down").stderr


@pytest.mark.hosts
@pytest.mark.parametrize("alone", [True, False])
def test_a_tied_head_ends_its_agents_and_itself_with_a_process(hosts: LoopbackHosts, *, alone: bool) -> None:
    """However that ends: it can take nothing down any more when it is killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        tied = ("--tied-to", str(process.pid))
        if alone:
            insitu(hosts.head, "up", "--hosts", str(hosts.file), "--head-only", *tied)
        hosts.up(*(() if alone else tied))
        head = records.read_head(Paths(hosts.head))
        assert head is not None and head.pid
        pids = [head.pid, *map(hosts.agent_pid, "ab")]
        process.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the end of head and agents")
    assert "the process that it is tied to has ended" in Paths(hosts.head).head_log.read_text()
    hosts.up()  # the next head is tied to nothing
    assert hosts.states() == {"a": "alive", "b": "alive"}


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


def owned_files(home: Path, node: str) -> list[Path]:
    """The partitions in the store of a node, and what imports have staged there."""
    paths = Paths(home)
    # os.walk passes over folders that an agent removes meanwhile; rglob fails on them.
    stores, staged = (
        [Path(at, name) for at, _, names in os.walk(folder) for name in names if name.startswith("part-")]
        for folder in (paths.node(node), paths.staging)
    )
    return sorted([*(file for file in stores if file.suffix == ".arrow"), *staged])


@pytest.mark.long
def test_an_import_lands_on_the_agents_and_is_read_from_there(hosts: LoopbackHosts, tmp_path: Path) -> None:
    hosts.up()
    np.save(tmp_path / "x.npy", np.arange(5000))
    paths, options = Paths(hosts.head), (str(tmp_path / "x.npy"), "--partitions", "4")
    said = insitu(hosts.head, "import", "digits", *options, "--backups", "1").stderr
    cache = Catalog(paths).get("digits")
    assert "Imported 5,000 rows" in said and "Sent " in said and " to a, " in said and " to b" in said
    assert {p.owners for p in cache.partitions} == {("a", "b"), ("b", "a")}
    assert [len(owned_files(home, name)) for name, home in hosts.homes.items()] == [4, 4]
    assert "verified: 8 files" in insitu(hosts.head, "describe", "digits", "--verify").stdout

    # A lost catalogue is put together again from what the agents have.
    assert json.loads(insitu(hosts.head, "rebalance", "digits", "--json").stdout)[0]["moves"] == []
    paths.catalog.unlink()
    assert "the catalogue doesn't know: digits version 1" in insitu(hosts.head, "caches").stderr
    assert "restored" in insitu(hosts.head, "repair").stdout
    assert Catalog(paths).get("digits") == cache

    # A process outside of a job reads what is here, and is told how to get it.
    read = "import insitu; print(sum(int(b.sum()) for b in insitu.dataset('digits').batch(100)))"

    def run(home: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "INSITU_HOME": str(home)}
        command = [sys.executable, "-c", read]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)

    assert run(hosts.homes["a"]).stdout == f"{sum(range(5000))}\n"
    assert "`insitu fetch digits` copies them" in run(hosts.head).stderr
    fetched = json.loads(insitu(hosts.head, "fetch", "digits", "--json").stdout)
    assert fetched == {"cache": "digits", "version": 1, "partitions": 4, "bytes": cache.bytes}
    assert run(hosts.head).stdout == f"{sum(range(5000))}\n"
    assert "are here already" in insitu(hosts.head, "fetch", "digits").stderr

    # A job trains where the partitions are.
    (tmp_path / "job").mkdir()
    program = (
        "import insitu\nme, data = insitu.context(), insitu.dataset()\n"
        "print('SUM', me.node, sum(int(b.sum()) for b in data.batch(100)), flush=True)"
    )
    (tmp_path / "job" / "train.py").write_text(program)
    done = insitu(hosts.head, "start", "digits", str(tmp_path / "job"), "train.py", KERAS_BACKEND="jax")
    sums = dict(re.findall(r"SUM (\w+) (\d+)", done.stdout))
    assert sums.keys() == {"a", "b"} and sum(map(int, sums.values())) == sum(range(5000))

    # What was replaced goes, and what an import that died has brought.
    dead = Paths(hosts.homes["a"]).staged("digits", f"{host_mark()}-1-dead").partition("a", 9)
    dead.parent.mkdir(parents=True)
    dead.write_bytes(b"x" * 100)
    insitu(hosts.head, "import", "digits", *options, "--overwrite")

    def versions(name: str) -> set[str]:
        return {file.parent.name for file in owned_files(hosts.homes[name], name)}

    wait_until(lambda: versions("a") == versions("b") == {"v2"}, "the removal of the old version")
    assert not dead.exists()
    insitu(hosts.head, "delete", "digits", "--yes")
    wait_until(lambda: versions("a") == versions("b") == set(), "the removal of the cache")
    insitu(hosts.head, "down")
    assert "whose head doesn't run" in insitu(hosts.head, "import", "digits", *options, code=1).stderr


@pytest.mark.hosts
def test_a_node_that_joins_gets_its_part_and_what_a_lost_one_had_is_made_again(
    hosts: LoopbackHosts, tmp_path: Path
) -> None:
    hosts.up()
    np.save(tmp_path / "x.npy", np.arange(60_000))
    options = ("--partitions", "6", "--backups", "1")
    insitu(hosts.head, "import", "digits", str(tmp_path / "x.npy"), *options)

    def rebalance(*options: str) -> dict[str, Any]:
        (found,) = json.loads(insitu(hosts.head, "rebalance", "digits", "--json", *options).stdout)
        assert not found["failed"] and not found["unavailable"]
        return dict(found)

    def count_copies() -> dict[str, int]:
        assert "verified: 12 files" in insitu(hosts.head, "describe", "digits", "--verify").stdout
        owners = [node for p in Catalog(Paths(hosts.head)).get("digits").partitions for node in p.owners]
        return {str(node): owners.count(node) for node in sorted(set(owners))}

    hosts.homes["c"] = tmp_path / "c"
    with hosts.file.open("a") as file:
        file.write(f"127.0.0.1 name=c home={hosts.homes['c']}\n")
    hosts.up()
    planned = rebalance("--dry-run")
    assert count_copies() == {"a": 6, "b": 6} and {move["to"] for move in planned["moves"]} == {"c"}
    done = rebalance("--rate", "100")
    assert done["moved"] == done["bytes"] == planned["bytes"] > 0
    assert count_copies() == {"a": 4, "b": 4, "c": 4}
    primaries = Counter(p.owners[0] for p in Catalog(Paths(hosts.head)).get("digits").partitions)
    assert primaries == {"a": 2, "b": 2, "c": 2} and done["promoted"]

    os.kill(hosts.agent_pid("c"), signal.SIGKILL)
    wait_until(lambda: hosts.states()["c"] == "lost", "the loss")
    rebalance()
    assert count_copies() == {"a": 6, "b": 6}
    hosts.up()
    assert rebalance()["moved"] == 0  # it has its copies still
    assert count_copies() == {"a": 4, "b": 4, "c": 4}


def agent(home: Path, head: str, *options: str, token: str, code: int = 1) -> str:
    """What `insitu agent --detach` says."""
    options = ("--detach", "--token-stdin", "--head", head, *options)
    return insitu(home, "agent", *options, given=f"{token}\n", code=code).stderr


@pytest.mark.long
def test_an_agent_that_runs_and_is_not_let_in_again_is_named(
    hosts: LoopbackHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`insitu up` said that it runs already, and `insitu nodes` that it is lost: nobody said why."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "real, ahead = time.time, os.path.join(os.environ.get('INSITU_HOME', ''), 'ahead')\n"
        "time.time = lambda: real() + 3600 * os.path.exists(ahead)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hosts.up()
    (hosts.homes["b"] / "ahead").touch()
    assert hosts.states() == {"a": "alive", "b": "alive"}  # nothing depends on its clock
    record = records.read_head(Paths(hosts.head))
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    said = " ".join(hosts.up(code=1).stderr.split())
    assert "The agent of b runs, but isn't let in. The clocks of nodes differ by 60 s at most" in said
    assert "1 of 2 hosts up" in said
    listed = insitu(hosts.head, "nodes").stderr
    assert "b isn't let in: The clocks" in listed and "a isn't" not in listed
    (hosts.homes["b"] / "ahead").unlink()
    wait_until(lambda: hosts.states() == {"a": "alive", "b": "alive"}, "b is let in")
    assert hosts.nodes()["b"]["refused"] is None
    assert "2 of 2 hosts up" in hosts.up().stderr


@pytest.mark.long
def test_a_head_whose_home_is_lost_is_replaced_and_agents_that_were_away_find_the_new_one(
    tmp_path: Path,
) -> None:
    """The agent of c is started with the address of the head before, as by a script at each boot."""
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b", "c"))) as hosts:
        hosts.up()
        np.save(tmp_path / "x.npy", np.arange(5000))
        insitu(hosts.head, "import", "digits", str(tmp_path / "x.npy"), "--partitions", "6", "--backups", "1")
        paths = {name: Paths(home) for name, home in hosts.homes.items()}
        wait_until(lambda: all(len(read_kept_members(p)) == 3 for p in paths.values()), "the lists of agents")
        partitions = Catalog(Paths(hosts.head)).get("digits").partitions
        before = records.read_head(Paths(hosts.head))
        assert before is not None
        lived = " ".join(hosts.move_head(tmp_path / "too early", "a", code=2).stderr.split())
        assert f"Received: the head at {before.address}, which answers" in lived
        assert records.read_head(Paths(hosts.head)) is None
        for pid in (hosts.agent_pid("c"), before.pid):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not records.is_locked(Paths(hosts.former[0]).head_lock), "the end of the head")
        again = ("agent", "--detach", "--name", "c", "--head", before.address)
        # While there is no other head, it serves its store, and the others recognize it.
        joined = json.loads(insitu(hosts.homes["c"], *again).stdout)
        assert "The head must be reachable" in joined["without_head"]
        lines = hosts.file.read_text().splitlines(keepends=True)
        hosts.file.write_text("".join(lines[:2]))  # nobody tells c
        said = hosts.move_head(tmp_path / "other head", "a").stderr
        assert "2 of 2 hosts up" in said and "`insitu repair` rebuilds it" in said, said
        wait_until(lambda: hosts.states() == dict.fromkeys("abc", "alive"), "the agents follow the new head")
        taken, kept = records.read_head(Paths(hosts.head)), records.read_agent(paths["c"], NodeId("c"))
        assert taken is not None and kept is not None and kept.head == taken.address
        assert taken.cluster == before.cluster
        assert f"has replaced the one at {before.address}" in " ".join(
            insitu(hosts.homes["c"], "nodes").stderr.split()
        )
        # What was handed out is read on; the new head rebuilds the rest.
        assert json.loads(insitu(hosts.homes["b"], "caches", "--json").stdout)[0]["rows"] == 5000
        assert insitu(hosts.head, "caches", "--json").stdout.strip() == "[]"
        assert "digits" in insitu(hosts.head, "repair").stdout
        found = Catalog(Paths(hosts.head)).get("digits").partitions
        assert [(p.index, p.rows, p.checksum) for p in found] == [
            (p.index, p.rows, p.checksum) for p in partitions
        ]
        assert "verified: 12 files" in insitu(hosts.head, "describe", "digits", "--verify").stdout
        # The head of before comes back, and hears of it from the first agent that is asked to follow it.
        former, hosts.head = hosts.head, hosts.former[0]
        refused = " ".join(hosts.up(code=1).stderr.split())
        assert f"which the one at {taken.address} has replaced" in refused, refused
        wait_until(lambda: not records.is_locked(Paths(hosts.head).head_lock), "the end of that head")
        log = Paths(hosts.head).head_log.read_text()
        assert f"the head at {taken.address} has replaced this one" in log
        listed = " ".join(insitu(hosts.head, "nodes").stderr.split())
        assert f"The head at {taken.address} has replaced the one of this home" in listed
        for change in (("delete", "--yes", "digits"), ("import", "more", str(tmp_path / "x.npy"))):
            said = " ".join(insitu(hosts.head, *change, code=None).stderr.split())
            assert "The head alone changes the catalogue" in said, said
        again_up = hosts.up(code=2).stderr
        assert f"whose head the one at {taken.address} has replaced" in " ".join(again_up.split())
        hosts.head = former
        assert hosts.states() == dict.fromkeys("abc", "alive")


def test_a_copy_of_the_home_of_a_head_ends_no_agent_and_deletes_no_store(
    hosts: LoopbackHosts, tmp_path: Path
) -> None:
    """What fails to come up there names `insitu down`, which ended the agents of the head that lives."""
    hosts.up()
    shutil.copytree(hosts.head, tmp_path / "copy")
    copied = ("up", "--hosts", str(hosts.file), "--launcher", "env HOST={host} sh -c", "--insitu", INSITU)
    said = " ".join(insitu(tmp_path / "copy", *copied, code=1).stderr.split())
    assert "A store has one agent. Received: a in" in said
    down = " ".join(insitu(tmp_path / "copy", "down", "--force", code=1).stderr.split())
    assert "A head ends its own agents alone. Received: a, whose head at" in down
    assert hosts.states() == {"a": "alive", "b": "alive"}
    assert all(Paths(home).node(NodeId(name)).exists() for name, home in hosts.homes.items())
    assert "2 agents ended" in insitu(hosts.head, "down").stderr


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
    versions = "import insitu.base._version as v; v.__version__ = '9.9'; from insitu.cli import main; main()"
    arguments = ("--token-stdin", "--head", head, "--name", "c")
    old = subprocess.run(
        [sys.executable, "-c", versions, "agent", *arguments],
        env={**os.environ, "INSITU_HOME": str(other)},
        input=f"{token}\n",
        capture_output=True,
        text=True,
        timeout=250,
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
    assert "2 of 3 hosts up" in done.stderr and "Received: no.such.host.invalid didn't" in done.stderr
    assert hosts.states() == {"a": "alive", "b": "alive"}
    listed = insitu(hosts.head, "nodes", "--check", "--json").stdout
    assert [each["node"] for each in json.loads(listed)] == ["a", "b"]
    # Hosts that one launcher has reached aren't asked by one that was tried later.
    for text in ("elsewhere name=d\n", hosts.file.read_text().splitlines()[0]):
        hosts.file.write_text(text)
        unreachable = ("up", "--hosts", str(hosts.file), "--launcher", "false {host}", "--insitu", INSITU)
        insitu(hosts.head, *unreachable, code=1)
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


@pytest.mark.hosts
def test_a_tied_agent_ends_with_the_process_that_has_started_it(hosts: LoopbackHosts, tmp_path: Path) -> None:
    """As with a step of Slurm that is killed."""
    hosts.up()
    record = records.read_head(Paths(hosts.head))
    assert record is not None
    shutil.copy(Paths(hosts.head).token, tmp_path / "token")
    environment: dict[str, Any] = {**os.environ, "INSITU_HOME": str(tmp_path)}
    command = f"{INSITU} agent --tied --head {record.address} --name c & wait"
    with subprocess.Popen(
        ["sh", "-c", command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as step:
        assert step.stdout is not None
        assert json.loads(step.stdout.readline())["node"] == "c" and hosts.states()["c"] == "alive"
        step.kill()
        assert step.stdout.read() == b""  # the agent had it, too
    wait_until(lambda: hosts.states()["c"] == "left", "the farewell")


def test_an_agent_is_tied_or_outlives_what_has_started_it(home: Path) -> None:
    said = insitu(home, "agent", "--tied", "--detach", "--head", "h:1", code=2).stderr
    assert "Received: --tied and --detach" in " ".join(said.split())


@pytest.mark.hosts
def test_jobs_are_seen_from_any_node_and_from_outside(hosts: LoopbackHosts, tmp_path: Path) -> None:
    hosts.up()
    np.save(tmp_path / "x.npy", np.arange(100))
    insitu(hosts.head, "import", "digits", str(tmp_path / "x.npy"))
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "hello.py").write_text("print('hello from the head')")
    insitu(hosts.head, "start", "--name", "greet", "digits", str(folder), "hello.py")
    record = records.read_head(Paths(hosts.head))
    assert record is not None
    outside = {"INSITU_CLUSTER": record.address, "INSITU_TOKEN_FILE": str(Paths(hosts.head).token)}
    wait_until(lambda: Paths(hosts.homes["a"]).catalog.exists(), "a copy of the catalogue")
    for home, variables in ((hosts.homes["a"], {}), (tmp_path / "outside", outside)):
        (job,) = json.loads(insitu(home, "ps", "--all", "--json", **variables).stdout)
        assert job["job_id"].startswith("greet-")
        assert "hello from the head" in insitu(home, "logs", job["job_id"], **variables).stdout
        assert insitu(home, "describe", "digits", "--json", **variables).stdout.count('"key"') == 1
        described = json.loads(insitu(home, "describe", job["job_id"], "--json", **variables).stdout)
        assert described["kind"] == "job"
        assert insitu(home, "stop", job["job_id"], code=None, **variables).returncode == 3  # it has ended


@pytest.mark.hosts
def test_what_is_left_of_two_hosts_goes_on_with_another_head(hosts: LoopbackHosts, tmp_path: Path) -> None:
    """The machine with the head and one of two agents is lost with its disk."""
    hosts.up()
    np.save(tmp_path / "x.npy", np.arange(5000))
    options = ("--partitions", "4", "--backups", "1")
    insitu(hosts.head, "import", "digits", str(tmp_path / "x.npy"), *options)
    before = Catalog(Paths(hosts.head)).get("digits")
    left = hosts.homes["b"]
    wait_until(lambda: json.loads(insitu(left, "caches", "--json").stdout), "a copy of the catalogue")
    head = records.read_head(Paths(hosts.head))
    assert head is not None
    for pid in (head.pid, hosts.agent_pid("a")):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not is_running(pid), "the end")
    shutil.rmtree(hosts.head)
    shutil.rmtree(hosts.homes.pop("a"))

    # Reading continues without a head.
    assert json.loads(insitu(left, "caches", "--json").stdout)[0]["rows"] == 5000
    program = "import insitu; print(sum(int(b.sum()) for b in insitu.dataset('digits').batch(100)))"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "INSITU_HOME": str(left)}
    read = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert read.stdout == f"{sum(range(5000))}\n", read.stderr

    # A home without the token, and one with another cluster's, get nothing.
    hosts.file.write_text(f"127.0.0.1 name=b home={left}\n")
    hosts.head = tmp_path / "stranger"
    assert "The cluster's token must be in" in hosts.up("--replace-head", code=2).stderr
    records.write_token(Paths(hosts.head), "of another cluster")
    refused = " ".join(hosts.up("--replace-head", code=2).stderr.split())
    assert "Who replaces a head has the cluster's token" in refused, refused
    # Without the option, it is another cluster.
    refused = " ".join(hosts.up(code=1).stderr.split())
    assert records.read_agent(Paths(left), NodeId("b")).epoch == head.epoch, refused
    insitu(hosts.head, "down")
    assert "1 of 1 host up" in hosts.move_head(tmp_path / "new head", "b").stderr
    repaired = insitu(hosts.head, "repair").stdout
    assert "digits" in repaired, repaired
    found = Catalog(Paths(hosts.head)).get("digits")
    assert [(p.index, p.rows, p.checksum) for p in found.partitions] == [
        (p.index, p.rows, p.checksum) for p in before.partitions
    ]
    assert "verified: 4 files" in insitu(hosts.head, "describe", "digits", "--verify", code=None).stdout
