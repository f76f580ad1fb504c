"""Commands about caches of Ignite."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from ignite_wire import FakeCache, FakeCluster, number

from insitu.base.errors import InputError, JobSpecError
from insitu.base.paths import Paths
from insitu.cli.connected import format_snapshot
from insitu.grid import Catalog
from insitu.grid.caches.snapshots import read_snapshot
from insitu.grid.sources import ColumnOptions
from insitu.service import report_snapshot


@pytest.fixture
def cluster() -> Any:
    rows = [[(number(4, "q", 2 * i + p), number(6, "d", i)) for i in range(5)] for p in range(2)]
    with FakeCluster(FakeCache(rows), [0, 0]) as found:
        found.add()
        yield found


def test_a_cache_is_imported_and_described_with_its_origin(home: Path, cluster: FakeCluster):
    run("import", "a", cluster.address(), "--without", "key")
    cache = Catalog(Paths(home)).get("a")
    assert [column.name for column in cache.columns] == ["value"] and cache.rows == 10
    assert f"read from  {cluster.address()}" in run("describe", "a").stdout
    assert json.loads(run("describe", "a", "--json").stdout)["origin"]["rows"] == 10


def test_a_cache_of_ignite_is_described(cluster: FakeCluster):
    text = run("describe", cluster.address(), "--verify").stdout
    assert "value: float64 (double)" in text and "topology   version 1.0, 2 partitions" in text
    assert "read       10 rows" in text
    found = json.loads(run("describe", cluster.address(), "--json").stdout)
    assert found["kind"] == "ignite" and found["problems"] == []
    with pytest.raises(InputError, match="is a table of another system"):
        run("describe", cluster.address(), "--ledger")


def test_a_job_on_ignite_reads_its_snapshot_first(
    home: Path, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from insitu import cluster as jobs

    submitted: list[Any] = []

    def submit(paths: Paths, request: Any) -> str:
        submitted.append(request)
        return "job-1"

    monkeypatch.setattr(jobs, "submit", submit, raising=False)
    text = run("start", "--detach", "--without", "key", cluster.address(), str(tmp_path), "train.py")
    (request,) = submitted
    (cache,) = Catalog(Paths(home)).caches()
    assert request.cache == cache.name and [c.name for c in cache.columns] == ["value"]
    assert "Read 10 rows: version 1 of ignite/127.0.0.1" in text.stderr and "0 B from others" in text.stderr
    with pytest.raises(JobSpecError, match="doesn't exist"):
        run("start", cluster.address(), str(tmp_path / "nothing"), "train.py")
    with pytest.raises(InputError, match=r"--without is said of .* Received: digits"):
        run("start", "--without", "key", "digits", str(tmp_path), "train.py")
    assert len(submitted) == 1


def test_a_job_shows_its_snapshot_and_what_has_moved(home: Path, cluster: FakeCluster):
    cache = read_snapshot(Paths(home), cluster.address(), ColumnOptions())
    ended, running = report_snapshot(cache, False), report_snapshot(cache, True)
    assert "now" not in ended["snapshot"] and "topology version 1.0" in format_snapshot(ended)
    assert format_snapshot(running).endswith("the topology is as it was")
    cluster.add()
    cluster.primaries, cluster.topology = [0, 1], (2, 0)
    moved = format_snapshot(report_snapshot(cache, True))
    assert "is now 2.0, 1 partition has another primary server. The job continues" in moved
    assert report_snapshot(replace(cache, origin=None), True) == {} and format_snapshot({}) == ""


def test_the_servers_come_from_a_clients_configuration(home: Path, cluster: FakeCluster, tmp_path: Path):
    file = tmp_path / "client.xml"
    bean = "org.apache.ignite.configuration.ClientConfiguration"
    server = f"127.0.0.1:{cluster.servers[0].port}"
    file.write_text(
        f'<beans><bean class="{bean}"><property name="addresses" value="{server}"/></bean></beans>'
    )
    run("import", "a", "CACHE", "-c", str(file))
    assert Catalog(Paths(home)).get("a").rows == 10
    assert run("describe", "CACHE", "-c", str(file)).stdout == run("describe", cluster.address()).stdout
    assert run("export", "a", "CACHE", "-c", str(file)).exit_code == 0
    with pytest.raises(InputError, match="Give the name of the table alone"):
        run("import", "b", cluster.address(), "--config", str(file))


def test_old_habits_of_asking_for_help_and_the_version():
    assert run("-V").stdout == run("--version").stdout
    for command in ((), ("start",)):
        assert run(*command, "-h").stdout == run(*command, "--help").stdout
    assert "-h" in run("start", "--help").stdout
