"""Commands about caches of Ignite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from ignite_wire import FakeCache, FakeCluster, number

from insitu.cli import build_app
from insitu.errors import InputError
from insitu.grid import Catalog
from insitu.paths import Paths


def run(*arguments: str) -> Any:
    """Runs a command in this process; errors of insitu are raised."""
    result = typer.testing.CliRunner().invoke(build_app(), arguments, catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


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
    assert "value: float64 (double)" in text and "topology   version 1.0, 2 partition(s)" in text
    assert "read       10 rows" in text
    found = json.loads(run("describe", cluster.address(), "--json").stdout)
    assert found["kind"] == "ignite" and found["problems"] == []
    with pytest.raises(InputError, match="is a cache of Ignite"):
        run("describe", cluster.address(), "--ledger")
