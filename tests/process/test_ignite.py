"""Real servers of Apache Ignite: what is loaded by Java is what training gets. Run by `make test-ignite`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cutting_proxy import cut_connections
from ignite_jobs import training_script
from ignite_rows import expected_types
from ignite_servers import FILES, IgniteServers, find_missing, run_java

from insitu.base.context import Context
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.extensions.ignite.description import describe_ignite
from insitu.grid import Catalog, bring_up, dataset, export_cache, import_cache, read_snapshot, take_down
from insitu.grid.importing import run_import
from insitu.grid.sources import ColumnOptions, describe_moves
from insitu.options import ImportOptions

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
    assert [column.name for column in visit.columns] == ["PERSON", "PLACE", "DAY", "HOURS"]
    found = rows_of(paths, visit, "PERSON")
    np.testing.assert_array_equal(found["HOURS"], np.arange(40) / 2)
    # Of SQL's DATE Java keeps the midnight in the servers' time zone.
    midnights = [datetime(1970, 1, 1) - timedelta(days=i) for i in range(40)]
    assert found["DAY"].tolist() == [round(midnight.timestamp() * 1000) for midnight in midnights]


def test_caches_of_other_modes_are_read(servers: IgniteServers, paths: Paths):
    (replicated,) = import_cache(paths, "replicated", [servers.address("replicated_numbers")])
    np.testing.assert_array_equal(rows_of(paths, replicated)["value"], np.arange(500) ** 2)
    (defaults,) = import_cache(paths, "defaults", [servers.address("defaults")])
    np.testing.assert_array_equal(rows_of(paths, defaults)["value"], np.arange(5000) * 3)
    snapshot = read_snapshot(paths, servers.address("defaults"), ColumnOptions())
    assert len(snapshot.partitions) == 1024 and snapshot.rows == 5000
    np.testing.assert_array_equal(rows_of(paths, snapshot)["value"], np.arange(5000) * 3)
    (lists,) = import_cache(paths, "lists", [servers.address("grid16_lists")], ragged=["value"])
    assert [len(row) for row in rows_of(paths, lists)["value"]] == [i % 5 for i in range(60)]


def test_objects_of_several_schemas_are_one_table(servers: IgniteServers, paths: Paths):
    (cache,) = import_cache(paths, "people", [servers.address("grid16_people")], fill=["city=?"])
    found = rows_of(paths, cache)
    np.testing.assert_array_equal(found["height"], [np.nan] * 50 + [i / 2 for i in range(50, 100)])
    assert found["city"].tolist() == ["?"] * 80 + [f"city {i}" for i in range(80, 100)]
    with pytest.raises(SourceError, match=r"Column city must have a value in each row"):
        import_cache(paths, "people2", [servers.address("grid16_people")])


def test_objects_of_several_classes_are_one_table(servers: IgniteServers, paths: Paths):
    address = servers.address("grid16_two_classes")
    with pytest.raises(SourceError, match=r"must have a value in each row.*--fill \w+=null"):
        import_cache(paths, "two", [address])
    notes: list[str] = []
    fill = ("image=0", "age=null", "label=-1", "city=?")
    options = ImportOptions("two", (address,), fill=fill)
    (cache,) = run_import(paths, options, note=notes.append)
    assert "value is of example.Drawing and of example.Person" in notes[0]
    found = rows_of(paths, cache)
    assert found["age"].tolist() == [i % 2 == 0 for i in range(20)]
    assert found["age_is_null"].tolist() == [i % 2 == 1 for i in range(20)]
    assert found["label"].tolist() == [-1 if i % 2 == 0 else i % 10 for i in range(20)]
    expected = [[0] * 4 if i % 2 == 0 else [(i * 31 + j * 7) % 256 for j in range(4)] for i in range(20)]
    assert found["image"].tolist() == expected


def test_lists_maps_and_null_are_columns(servers: IgniteServers, paths: Paths, tmp_path: Path):
    address = servers.address("grid16_nested")
    with pytest.raises(
        SourceError, match=r"4 parts.*ids is Collection of 0 to 3.*--ragged ids.*map is Map"
    ) as caught:
        import_cache(paths, "nested", [address])
    for name in ("map", "tags", "words"):
        assert f"--dtype {name}=json" in str(caught.value), name
    dtype, fill = ["map=json", "tags=json", "words=json"], ["text=null", "count=null"]
    (cache,) = import_cache(paths, "nested", [address], dtype=dtype, fill=fill, ragged=["ids"])
    found, keys = rows_of(paths, cache), range(40)
    assert found["doubles"].tolist() == [[i / 2, -i / 4] for i in keys]
    assert found["matrix"].tolist() == [[[i, 1], [2, i / 8]] for i in keys]
    assert found["boxes"].tolist() == [[i, -i, 7] for i in keys]
    assert [list(row) for row in found["ids"]] == [[i * 10 + j for j in range(i % 4)] for i in keys]
    assert [json.loads(text) for text in found["words"]] == [[f"a{i}", "b"] for i in keys]
    assert [json.loads(text) for text in found["map"]] == [[["k", i], ["l", [i / 2]]] for i in keys]
    assert [json.loads(text) for text in found["tags"]] == [[{"n": i, "name": f"tag {i}"}] * 2 for i in keys]
    assert found["text"].tolist() == ["" if i % 3 == 0 else f"text {i}" for i in keys]
    assert found["text_is_null"].tolist() == [i % 3 == 0 for i in keys]
    assert found["count"].tolist() == [0 if i % 5 == 0 else i for i in keys]
    assert found["count_is_null"].tolist() == [i % 5 == 0 for i in keys]
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "read.py").write_text(JOB)
    given = [*(f"--dtype={each}" for each in dtype), *(f"--fill={each}" for each in fill), "--ragged=ids"]
    bring_up(paths, 1)
    started = insitu("start", "--workers", "1", *given, address, str(folder), "read.py", address)
    assert "40 rows" in started.stderr, started.stderr


def test_what_cant_be_a_column_is_named(servers: IgniteServers, paths: Paths):
    address = servers.address("grid16_unusable")
    with pytest.raises(
        SourceError, match=r"3 parts.*day is an object that.*map is Map.*names is String"
    ) as caught:
        import_cache(paths, "unusable", [address])
    assert "--without day" in str(caught.value) and "--dtype map=json" in str(caught.value)
    dtype = ["names=json", "map=json"]
    (cache,) = import_cache(paths, "usable", [address], without=["day"], dtype=dtype)
    found = rows_of(paths, cache)
    assert found["good"].tolist() == list(range(10)) and found["numbers"].tolist() == [[1, 2]] * 10
    assert set(found["names"]) == {'["a", "b"]'} and set(found["map"]) == {'[["a", 1]]'}
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


def test_pages_that_are_cut_in_the_middle_are_read_again(
    servers: IgniteServers, paths: Paths, monkeypatch: pytest.MonkeyPatch
):
    """Each server's connection breaks within a page, twice; then it does so each time."""
    load(servers, "images:grid16_cut:3000")
    address, ports = servers.address("grid16_cut"), servers.ports.values()
    (whole,) = import_cache(paths, "whole", [address])
    with cut_connections(ports, after=200_000, cuts=2) as proxies:
        (cut,) = import_cache(paths, "cut", [address])
    assert sum(proxy.done for proxy in proxies) >= 3
    assert cut.rows == 3000 and same_rows(whole, cut)
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
    with cut_connections(ports, after=60_000, cuts=-1), pytest.raises(SourceError, match=r"must answer"):
        import_cache(paths, "never", [address])
    assert Catalog(paths).find("never") is None


def test_servers_that_stop_answering_are_given_up(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One of two stops in the middle: the other has its rows. Both have stopped: an error, and no cache."""
    with IgniteServers(tmp_path / "ignite", region_mib=256) as cluster:
        cluster.start(0, 1)
        load(cluster, "images:grid16_images:30000")
        address = cluster.address("grid16_images")
        (before,) = import_cache(paths, "images", [address])
        stopped = []

        def stop_one(rows: int, done: int, total: int | None) -> None:
            if rows and not stopped:
                stopped.append(1)
                os.kill(cluster.processes[1].pid, signal.SIGSTOP)

        (after,) = import_cache(paths, "again", [address], progress=stop_one)
        assert stopped and after.rows == 30000 and same_rows(before, after)
        os.kill(cluster.processes[0].pid, signal.SIGSTOP)
        monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
        with pytest.raises(SourceError, match=r"must answer"):
            import_cache(paths, "none", [address])
    assert Catalog(paths).find("none") is None


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


def test_a_snapshot_outlives_its_servers(paths: Paths, tmp_path: Path):
    """Each node holds the rows of its server. One is killed while it is read, another one joins: the rows
    stay, what came from others is counted, and what has moved is said."""
    bring_up(paths, 3)
    with IgniteServers(tmp_path / "ignite", region_mib=256) as cluster:
        cluster.start(0, 1, 2)
        load(cluster, "images:grid16_images:30000")
        address = cluster.address("grid16_images")
        whole = read_snapshot(paths, address, ColumnOptions())
        origin = dict(whole.origin or {})
        assert origin["remote_bytes"] == 0 and origin["local_bytes"] > 30000 * 784
        assert [p.owners[0] for p in whole.partitions] == [f"node-{n}" for n in origin["primaries"]]
        assert len(set(origin["primaries"])) == 3
        killed = []

        def kill_one(rows: int, done: int, total: int | None) -> None:
            if rows and not killed:
                killed.append(1)
                cluster.kill(1)

        again = read_snapshot(paths, address, ColumnOptions(), progress=kill_one)
        assert killed and same_rows(whole, again)
        cluster.start(3)
        now = describe_moves(origin, 5.0)
        assert now["problem"] is None and now["topology"][0] > origin["topology"][1][0] and now["moved"] > 0


JOB = """
import sys
import insitu

rows = insitu.dataset(sys.argv[1], label=None).batch(600)
for shard in rows.shards:
    for batch in rows.shard_batches(shard, 0):
        if batch.rows:
            print("KEYS", *batch.data["key"].tolist())
"""


def test_a_job_reads_in_place_and_its_shards_follow_from_the_servers(
    servers: IgniteServers, paths: Paths, tmp_path: Path
):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "read.py").write_text(JOB)
    address = servers.address("defaults")
    shards = []
    for nodes in (3, 1):
        take_down(paths, force=True)
        bring_up(paths, nodes)
        command = ["start", "--workers", str(nodes), "--shards", "3", "--name", f"on-{nodes}", "--no-prefix"]
        started = insitu(*command, address, str(folder), "read.py", address)
        printed = [line.split()[1:] for line in started.stdout.splitlines() if "KEYS" in line]
        keys = [int(key) for line in printed for key in line]
        assert sorted(keys) == list(range(5000)), started.stderr
        (job,) = (each["job_id"] for each in json.loads(insitu("ps", "--all", "--json").stdout))
        found = json.loads(insitu("describe", job, "--json").stdout)
        assert found["snapshot"]["remote_bytes"] == 0 and found["snapshot"]["rows"] == 5000
        assert all(task["reads"]["remote_bytes"] == 0 for task in found["task_list"])
        assert len({shard["home"] for shard in found["shards"]}) == nodes
        shards.append([shard["partitions"] for shard in found["shards"]])
        insitu("delete", job, "--yes")
    assert shards[0] == shards[1]


def test_a_start_writes_the_partitions_alone_that_have_changed(
    servers: IgniteServers, paths: Paths, tmp_path: Path
):
    """All rows are read, and the files are those of a home that has read them for the first time."""
    folder, fresh = tmp_path / "job", Paths(tmp_path / "fresh")
    folder.mkdir()
    (folder / "read.py").write_text(JOB)
    for home in (paths, fresh):
        bring_up(home, 3)
    load(servers, "numbers:grid16_again:0:2000")
    address, found, kept = servers.address("grid16_again"), [], []
    for rows in (2000, 2000, 2001):
        if rows == 2001:
            load(servers, "numbers:grid16_again:2000:2001")
        insitu("start", "--workers", "3", address, str(folder), "read.py", address)
        cache = Catalog(paths).caches()[0]
        places = [(p.owners[0], cache.name, cache.version, p.index) for p in cache.partitions]
        found.append([paths.partition(*place).stat().st_ino for place in places])
        assert cache.rows == rows and dict(cache.origin or {})["remote_bytes"] == 0
        kept.append(dict(cache.origin or {})["local_bytes"])
    assert kept[0] == kept[1] < kept[2]  # the servers have sent all rows each time
    assert found[0] == found[1] and len(set(found[1]) & set(found[2])) == 15
    expected = read_snapshot(fresh, address, ColumnOptions())
    assert cache.partitions == expected.partitions and same_rows(cache, expected)
    for place in places:
        there = fresh.partition(*place[:2], expected.version, place[3])
        assert paths.partition(*place).read_bytes() == there.read_bytes()


PREDICT = """
print("PREDICTED", insitu.predict_into(model, rows, {target!r}))
"""


def test_training_follows_what_changes_in_ignite(paths: Paths, tmp_path: Path):
    """Rows are added, a server dies and another one joins: the next epoch has them. A worker dies: its
    successor reads what the others read. Predictions land beside the rows."""
    bring_up(paths, 2)
    with IgniteServers(tmp_path / "ignite", region_mib=256) as cluster:
        cluster.start(0, 1)
        load(cluster, "numbers:grid16_numbers:0:2000")
        target = cluster.address("grid16_predictions", 0)
        job_dir = tmp_path / "job"
        job_dir.mkdir()
        (job_dir / "train.py").write_text(training_script(tmp_path, 3) + PREDICT.format(target=target))
        command = ["start", "--workers", "2", "--refresh", "epoch", "--name", "follow", "--standby", "0"]
        command += [cluster.address("grid16_numbers"), str(job_dir), "train.py"]
        process = subprocess.Popen([sys.executable, "-m", "insitu", *command], text=True)
        await_file(tmp_path / "ended-0", process)
        load(cluster, "numbers:grid16_numbers:2000:2500")
        cluster.kill(1)
        cluster.start(2)
        (tmp_path / "go-0").touch()
        await_file(tmp_path / "ended-1", process)
        (job,) = (each["job_id"] for each in json.loads(insitu("ps", "--all", "--json").stdout))
        tasks = json.loads(insitu("describe", job, "--json").stdout)["task_list"]
        (victim,) = (task["pid"] for task in tasks if task["task"] == "worker:1")
        os.kill(victim, signal.SIGKILL)
        (tmp_path / "go-1").touch()
        (tmp_path / "go-2").touch()
        assert process.wait(120) == 0
        found = json.loads(insitu("describe", job, "--ledger", "--json").stdout)
        assert len(found["attempts"]) == 1 and len(found["recoveries"]) == 1
        assert [each["rows"] for each in found["refreshes"]] == [2500, 2500]
        assert [each["problem"] for each in found["refreshes"]] == [None, None]
        before, after = found["snapshot"], found["refreshes"][0]["snapshot"]
        assert after["topology"][0][0] > before["topology"][0][0] and before["digest"] != after["digest"]
        assert after["digest"] == found["refreshes"][1]["snapshot"]["digest"]
        audited = [(e["version"], e["expected"], e["counted"], e["clean"]) for e in found["ledger"]]
        assert audited == [(1, 2000, 2000, True), (2, 2500, 2500, True), (3, 2500, 2500, True)]
        (back,) = import_cache(paths, "back", [target])
        np.testing.assert_array_equal(np.sort(rows_of(paths, back)["key"]), np.arange(2500))


def await_file(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.05)


def insitu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "insitu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_exported_rows_are_those_that_java_writes(servers: IgniteServers, paths: Paths, tmp_path: Path):
    keys = np.arange(100)
    rows = {
        "key": keys,
        "image": (keys[:, None] + np.arange(12)).astype(np.uint8),
        "score": (keys / 8).astype(np.float32),
        "meta.width": keys.astype(np.int32),
        "meta.country": np.array(["DE", "\u65e5\u672c"] * 50),
    }
    np.savez(tmp_path / "rows.npz", **rows)
    import_cache(paths, "rows", [str(tmp_path / "rows.npz")])
    address = servers.address("grid16_exported")
    for _ in range(2):
        assert export_cache(paths, "rows", address, type_name="example.Exported").rows == 100
    load(servers, "exported:grid16_exported:100")
    (back,) = import_cache(paths, "back", [address])
    found = rows_of(paths, back)
    assert found.keys() == rows.keys()
    for name, values in rows.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    with pytest.raises(InputError, match="the SQL table CITY"):
        export_cache(paths, "rows", servers.address("CITY"))


def test_values_of_several_rows_of_arrow_data(servers: IgniteServers, paths: Paths, tmp_path: Path):
    streams = []
    for value in range(20):
        batch = pa.record_batch({"x": np.arange(3) + 10 * value, "y": np.full(3, value / 2)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        streams.append(np.frombuffer(sink.getvalue(), np.uint8))
    np.savez(tmp_path / "streams.npz", key=np.arange(20), value=np.stack(streams))
    import_cache(paths, "streams", [str(tmp_path / "streams.npz")])
    export_cache(paths, "streams", servers.address("grid16_arrow"))
    cache = read_snapshot(paths, servers.address("grid16_arrow"), ColumnOptions(arrow=frozenset(["value"])))
    assert cache.rows == 60 and sum(rows for _, rows, _ in dict(cache.origin or {})["partitions"]) == 20
    found = rows_of(paths, cache, "x")
    np.testing.assert_array_equal(found["key"], np.repeat(np.arange(20), 3))
    np.testing.assert_array_equal(found["y"], np.repeat(np.arange(20) / 2, 3))


def test_certificates_of_clients(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with IgniteServers(tmp_path / "ignite", tls=True, client_certificates=True) as cluster:
        cluster.start(0)
        for name, value in cluster.environment().items():
            monkeypatch.setenv(name, value)
        np.savez(tmp_path / "rows.npz", key=np.arange(50), value=np.arange(50) * 2)
        import_cache(paths, "rows", [str(tmp_path / "rows.npz")])
        export_cache(paths, "rows", cluster.address("grid16_numbers"))
        (cache,) = import_cache(paths, "numbers", [cluster.address("grid16_numbers")])
        np.testing.assert_array_equal(rows_of(paths, cache)["value"], np.arange(50) * 2)
        monkeypatch.delenv("INSITU_IGNITE_CERT")
        monkeypatch.delenv("INSITU_IGNITE_KEY")
        with pytest.raises(SourceError, match="INSITU_IGNITE_CERT"):
            import_cache(paths, "other", [cluster.address("grid16_numbers")])


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
