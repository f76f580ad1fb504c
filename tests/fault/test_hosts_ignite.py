"""Servers of Apache Ignite on hosts of agents: each agent reads its own. Run by `make test-ignite`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_hosts import INSITU, insitu
from hosts_lab import HostsLab, find_obstacle
from ignite_jobs import training_script
from ignite_servers import FILES, IgniteServers, find_missing, run_java

from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.cluster import find_owners
from insitu.grid import bring_up, read_snapshot
from insitu.grid.sources import ColumnOptions

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.ignite,
    pytest.mark.skipif(bool(find_missing() or find_obstacle()), reason=find_missing() or find_obstacle()),
]
ROWS = 3000
JOB = """
import sys
import insitu

me = insitu.context()
rows = insitu.dataset(sys.argv[1], label=None).batch(600)
for shard in rows.shards:
    for batch in rows.shard_batches(shard, 0):
        if batch.rows:
            print("KEYS", me.node, *batch.data["key"].tolist())
"""
PASSWORD = "ignite"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[HostsLab]:
    with HostsLab(tmp_path / "lab", 2) as found:
        yield found


def checksums(cache: CacheSpec) -> list[tuple[int, str]]:
    return [(info.rows, info.checksum) for info in cache.partitions]


def up(lab: HostsLab, head: Path) -> None:
    file = head.with_name("hosts.txt")
    file.write_text("".join(f"{host.address}\n" for host in lab.hosts))
    insitu(head, "up", "--hosts", str(file), "--launcher", lab.launcher, "--insitu", INSITU)


def test_each_host_reads_and_trains_on_the_rows_of_its_own_server(
    lab: HostsLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the rows goes over the network. A server that dies is read from the next one."""
    head = tmp_path / "head"
    hosts = dict(enumerate(lab.hosts))
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "read.py").write_text(JOB)
    with IgniteServers(tmp_path / "ignite", hosts=hosts) as servers:
        servers.start(0, 1)
        addresses = ",".join(f"{servers.host(n)}:{port}" for n, port in servers.ports.items())
        run_java(FILES / "Load.java", addresses, "", "", "plain", f"numbers:grid16_numbers:0:{ROWS}")
        monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "20")
        address = servers.address("grid16_numbers", 0)
        try:
            up(lab, head)
            started = insitu(head, "start", "--no-prefix", address, str(folder), "read.py", address)
            assert_in_place(head, started.stdout)
            local = Paths(tmp_path / "local")
            bring_up(local, 2)
            plain = read_snapshot(local, address, ColumnOptions())
            killed = []

            def kill_one(rows: int, done: int, total: int | None) -> None:
                if not killed:
                    killed.append(1)
                    servers.kill(1)

            remote = find_owners(Paths(head))
            again = read_snapshot(Paths(head), address, ColumnOptions(), progress=kill_one, remote=remote)
        finally:
            insitu(head, "down", code=None)
    assert checksums(again) == checksums(plain)
    first, last = dict(plain.origin or {}), dict(again.origin or {})
    assert first["digest"] == last["digest"] and first["primaries"] == last["primaries"]
    assert last["nodes"]["host1"]["remote_bytes"] == 0 < last["nodes"]["host2"]["remote_bytes"]


def assert_in_place(head: Path, printed: str) -> None:
    """Each of two workers has read the rows of the server on its host, and nothing else."""
    found: dict[str, set[int]] = {}
    for words in (line.split() for line in printed.splitlines() if line.startswith("KEYS")):
        found.setdefault(words[1], set()).update(map(int, words[2:]))
    assert found.keys() == {"host1", "host2"} and found["host1"] | found["host2"] == set(range(ROWS))
    (listed,) = json.loads(insitu(head, "ps", "--all", "--json").stdout)
    job: dict[str, Any] = json.loads(insitu(head, "describe", listed["job_id"], "--json").stdout)
    snapshot = job["snapshot"]
    assert snapshot["remote_bytes"] == 0 and snapshot["rows"] == ROWS
    assert {node: read["rows"] for node, read in snapshot["nodes"].items()} == {
        node: len(keys) for node, keys in found.items()
    }
    assert all(task["reads"]["remote_bytes"] == 0 for task in job["task_list"])
    text = insitu(head, "describe", listed["job_id"]).stdout
    assert "from primary servers on the nodes' hosts, 0 B from others" in " ".join(text.split())


def test_agents_read_rows_again_that_were_added(
    lab: HostsLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent reads its own server again, with the credentials of `insitu start`, which are in no file.
    The job says that servers are lost, and training continues with the rows of the epoch before."""
    head, folder = tmp_path / "head", tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(training_script(tmp_path, 4))
    hosts = dict(enumerate(lab.hosts))
    with IgniteServers(tmp_path / "ignite", hosts=hosts, authentication=True) as servers:
        servers.start(0, 1)
        up(lab, head)  # agents know no credentials
        with contextlib.ExitStack() as ends:
            ends.callback(insitu, head, "down", code=None)
            for name, value in servers.environment().items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "5")
            load_numbers(servers, 0, 2000)
            command = ["start", "--workers", "2", "--refresh", "epoch", "--standby", "0"]
            command += [servers.address("grid16_numbers"), str(folder), "train.py"]
            environment = {**os.environ, "INSITU_HOME": str(head)}
            process = ends.enter_context(started(command, environment))
            await_file(tmp_path / "ended-0", process)
            load_numbers(servers, 2000, 2500)
            (tmp_path / "go-0").touch()
            await_file(tmp_path / "ended-1", process)
            (tmp_path / "go-1").touch()
            await_file(tmp_path / "ended-2", process)
            for number in (0, 1):
                servers.kill(number)
            (tmp_path / "go-2").touch()
            (tmp_path / "go-3").touch()
            assert process.wait(120) == 0
            (listed,) = json.loads(insitu(head, "ps", "--all", "--json").stdout)
            found = json.loads(insitu(head, "describe", listed["job_id"], "--ledger", "--json").stdout)
    assert_refreshed(found)
    assert_in_no_file(head)


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while other things happen; it ends with this."""
    process = subprocess.Popen([sys.executable, "-m", "insitu", *command], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def assert_refreshed(found: dict[str, Any]) -> None:
    """The second epoch has 500 more rows, the third the same, and the fourth couldn't be read."""
    assert len(found["attempts"]) == 1 and not found["recoveries"]
    first, second, third = found["refreshes"]
    assert [each["rows"] for each in (first, second, third)] == [2500, 2500, 2500]
    assert first["problem"] is None and second["problem"] is None
    assert "must answer" in third["problem"] and third["version"] == second["version"]
    assert first["snapshot"]["digest"] == second["snapshot"]["digest"] != found["snapshot"]["digest"]
    for each in (first, second):
        assert each["snapshot"]["remote_bytes"] == 0
        read = each["snapshot"]["nodes"]
        assert {node: done["rows"] > 0 for node, done in read.items()} == {"host1": True, "host2": True}
    audited = [(e["version"], e["expected"], e["counted"], e["clean"]) for e in found["ledger"]]
    assert audited == [(1, 2000, 2000, True), *((n, 2500, 2500, True) for n in (2, 3, 3))]
    assert all(task["reads"]["remote_bytes"] == 0 for task in found["task_list"])


def assert_in_no_file(home: Path) -> None:
    """The password isn't in what is in a home, logs and specifications among it."""
    words = (f"PASSWORD={PASSWORD}", f'PASSWORD": "{PASSWORD}"', f"'{PASSWORD}'")
    for path in home.rglob("*"):
        if path.is_file():
            text = path.read_text(errors="replace")
            assert not any(word in text for word in words), path


def load_numbers(servers: IgniteServers, first: int, stop: int) -> None:
    addresses = ",".join(f"{servers.host(n)}:{port}" for n, port in servers.ports.items())
    what = ("activate", f"numbers:grid16_numbers:{first}:{stop}")
    run_java(FILES / "Load.java", addresses, "ignite", PASSWORD, "plain", *what)


def await_file(path: Path, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.05)
