"""Real servers of Apache Ignite: what is loaded by Java is what training gets. Run by `make test-ignite`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ignite_rows import expected_types
from ignite_servers import FILES, IgniteServers, find_missing, run_java

from insitu.context import Context
from insitu.errors import InputError, SourceError
from insitu.grid import Catalog, dataset, import_cache
from insitu.grid.ignite import FieldOptions, describe_ignite
from insitu.paths import Paths
from insitu.spec import CacheSpec

pytestmark = [pytest.mark.ignite, pytest.mark.skipif(bool(find_missing()), reason=find_missing())]


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "20")


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)


def load(servers: IgniteServers, *what: str, user: str = "", password: str = "", tls: str = "plain") -> None:
    addresses = ",".join(f"127.0.0.1:{port}" for port in servers.ports.values())
    run_java(FILES / "Load.java", addresses, user, password, tls, *what)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IgniteServers]:
    """Three servers with all caches of `types`."""
    with IgniteServers(tmp_path_factory.mktemp("ignite")) as cluster:
        cluster.start(0, 1, 2)
        load(cluster, "types")
        yield cluster


def rows_of(paths: Paths, cache: CacheSpec, key: str = "key") -> dict[str, Any]:
    """All rows by column, ordered by a column."""
    context = Context(paths=paths)
    batch = dataset(cache.name, paths=paths, context=context, label=None).sample(cache.rows)
    order = np.argsort(batch[key])
    return {name: np.asarray(values)[order] for name, values in batch.items()}


def test_every_type_is_read_as_java_wrote_it(servers: IgniteServers, paths: Paths):
    (cache,) = import_cache(paths, "types", [servers.address("grid16_types", 0)])
    found = rows_of(paths, cache)
    np.testing.assert_array_equal(found["key"], range(200))
    expected = expected_types(found["key"])
    assert found.keys() == {"key", *expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_keys_of_any_class_are_columns(servers: IgniteServers, paths: Paths):
    (texts,) = import_cache(paths, "texts", [servers.address("grid16_texts")])
    assert sorted(rows_of(paths, texts)["key"]) == sorted(f"key {i}" for i in range(300))
    (keys,) = import_cache(paths, "keys", [servers.address("grid16_keys")])
    found = rows_of(paths, keys, "key.a")
    assert found["key.b"].tolist() == [f"b{i}" for i in range(100)]
    np.testing.assert_array_equal(found["value"], np.arange(100) / 8)
    (ids,) = import_cache(paths, "ids", [servers.address("grid16_uuids")])
    assert ids.rows == 50 and ids.columns[0].shape == (16,)


def test_sql_tables_have_their_columns(servers: IgniteServers, paths: Paths):
    (city,) = import_cache(paths, "city", [servers.address("PUBLIC.CITY")])
    found = rows_of(paths, city, "ID")
    assert [column.name for column in city.columns] == ["ID", "NAME", "PEOPLE"]
    assert found["NAME"].tolist() == [f"city {i}" for i in range(40)]
    np.testing.assert_array_equal(found["PEOPLE"], np.arange(40) * 1000)
    (visit,) = import_cache(paths, "visit", [servers.address("VISIT")])
    assert [column.name for column in visit.columns] == ["PERSON", "PLACE", "HOURS"]
    np.testing.assert_array_equal(rows_of(paths, visit, "PERSON")["HOURS"], np.arange(40) / 2)


def test_caches_of_other_modes_are_read(servers: IgniteServers, paths: Paths):
    (replicated,) = import_cache(paths, "replicated", [servers.address("replicated_numbers")])
    np.testing.assert_array_equal(rows_of(paths, replicated)["value"], np.arange(500) ** 2)
    (defaults,) = import_cache(paths, "defaults", [servers.address("defaults")])
    np.testing.assert_array_equal(rows_of(paths, defaults)["value"], np.arange(5000) * 3)
    (lists,) = import_cache(paths, "lists", [servers.address("grid16_lists")], ragged=["value"])
    assert [len(row) for row in rows_of(paths, lists)["value"]] == [i % 5 for i in range(60)]


def test_objects_of_several_schemas_are_one_table(servers: IgniteServers, paths: Paths):
    options = FieldOptions(fills={"city": "?"})
    (cache,) = import_cache(paths, "people", [servers.address("grid16_people")], fields=options)
    found = rows_of(paths, cache)
    np.testing.assert_array_equal(found["height"], [np.nan] * 50 + [i / 2 for i in range(50, 100)])
    assert found["city"].tolist() == ["?"] * 80 + [f"city {i}" for i in range(80, 100)]
    with pytest.raises(SourceError, match=r"Column city must have a value in each row"):
        import_cache(paths, "people2", [servers.address("grid16_people")])


def test_what_cant_be_a_column_is_named(servers: IgniteServers, paths: Paths):
    with pytest.raises(SourceError, match=r"map is Map.*names is String.*numbers is Collection") as caught:
        import_cache(paths, "unusable", [servers.address("grid16_unusable")])
    assert "--without map" in str(caught.value)
    options = FieldOptions(without=frozenset(["numbers", "names", "map"]))
    (cache,) = import_cache(paths, "usable", [servers.address("grid16_unusable")], fields=options)
    assert rows_of(paths, cache)["good"].tolist() == list(range(10))
    with pytest.raises(SourceError, match=r"example\.\w+ and of example\.\w+"):
        import_cache(paths, "two", [servers.address("grid16_two_classes")])
    with pytest.raises(SourceError, match=r"has no rows"):
        import_cache(paths, "empty", [servers.address("grid16_empty")])
    with pytest.raises(InputError, match=r"must exist in Ignite"):
        import_cache(paths, "none", [servers.address("nothing_here")])


def test_a_cache_is_described(servers: IgniteServers):
    found = describe_ignite(servers.address("grid16_types"), count_rows=True)
    assert (found["rows"], found["partitions"], found["backups"]) == (200, 16, 1)
    assert sum(node["primaries"] for node in found["nodes"]) == 16 and len(found["nodes"]) == 3
    assert sum(part["rows"] for part in found["partition_list"]) == 200
    problems = describe_ignite(servers.address("grid16_unusable"), count_rows=False)["problems"]
    assert len(problems) == 3


def test_a_large_value_is_read(servers: IgniteServers, paths: Paths):
    load(servers, f"large:single16_large:{20 << 20}")
    (cache,) = import_cache(paths, "large", [servers.address("single16_large")], partitions=1)
    assert cache.rows == 2 and cache.columns[1].shape == (20 << 20,)


def test_what_was_recorded_is_what_servers_send(servers: IgniteServers):
    """The unit tests without Java rest on it."""
    from ignite_recording import RECORDED, record

    recorded = json.loads(RECORDED.read_text())
    now = record(("127.0.0.1", servers.ports[0]))
    assert now.keys() == recorded.keys()
    for name in ("configuration", "size"):
        assert now[name] == recorded[name], name


def test_servers_that_die_and_join_change_nothing(paths: Paths, tmp_path: Path):
    """A server is killed while its partitions are read, and another one joins: the same cache each time."""
    with IgniteServers(tmp_path / "ignite", region_mib=256) as cluster:
        cluster.start(0, 1)
        load(cluster, "images:grid16_images:30000", "images:single16_images:30000")
        (before,) = import_cache(paths, "images", [cluster.address("grid16_images")])
        assert before.rows == 30000
        killed = []

        def kill_one(rows: int, done: int, total: int | None) -> None:
            if rows and not killed:
                killed.append(1)
                cluster.kill(1)

        address = cluster.address("grid16_images")
        (after,) = import_cache(paths, "images", [address], overwrite=True, progress=kill_one)
        assert killed and same_rows(before, after)
        assert before.origin is not None and after.origin is not None
        cluster.start(2)
        (joined,) = import_cache(paths, "images", [cluster.address("grid16_images")], overwrite=True)
        assert same_rows(before, joined)
        assert joined.origin is not None and joined.origin["topology"][0] > before.origin["topology"][0]
        with pytest.raises(SourceError, match=r"of 30000|must answer"):
            lose_partitions(paths, cluster)
    assert Catalog(paths).get("images").version == joined.version


def lose_partitions(paths: Paths, cluster: IgniteServers) -> None:
    """Import a cache without backups, one of whose servers dies meanwhile."""
    load(cluster, "images:single16_images:30000")
    killed = []

    def kill_one(rows: int, done: int, total: int | None) -> None:
        if rows and not killed:
            killed.append(1)
            cluster.kill(2)

    import_cache(paths, "lost", [cluster.address("single16_images")], progress=kill_one)


def same_rows(one: CacheSpec, other: CacheSpec) -> bool:
    assert one.origin is not None and other.origin is not None
    same = [p.checksum for p in one.partitions] == [p.checksum for p in other.partitions]
    return same and one.origin["digest"] == other.origin["digest"]


def test_tls_and_authentication(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with IgniteServers(tmp_path / "ignite", tls=True, authentication=True) as cluster:
        for name, value in cluster.environment().items():
            monkeypatch.setenv(name, value)
        cluster.start(0)
        store = str(cluster.folder / "server.p12")
        load(cluster, "activate", "numbers:grid16_numbers:0:50", user="ignite", password="ignite", tls=store)
        address = cluster.address("grid16_numbers")
        (cache,) = import_cache(paths, "numbers", [address])
        np.testing.assert_array_equal(rows_of(paths, cache)["value"], range(50))
        monkeypatch.setenv("INSITU_IGNITE_PASSWORD", "wrong one")
        with pytest.raises(SourceError, match=r"wants a user and a password") as caught:
            import_cache(paths, "other", [address])
        assert "wrong one" not in str(caught.value)
        monkeypatch.setenv("INSITU_IGNITE_PASSWORD", "ignite")
        monkeypatch.setenv("INSITU_IGNITE_SERVER_NAME", "elsewhere")
        with pytest.raises(SourceError, match=r"for the server's name"):
            import_cache(paths, "other", [address])
        monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "5")
        monkeypatch.setenv("INSITU_IGNITE_TLS", "0")
        with pytest.raises(SourceError, match=r"TLS"):
            import_cache(paths, "other", [address])
