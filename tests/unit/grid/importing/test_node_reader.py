"""Nodes read sources themselves: the bytes are those of an import that reads them on one machine."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from partition_servers import SECRET
from store_hosts import StoreHosts

from insitu.base.errors import GridError, InputError, SourceError, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId
from insitu.grid import Catalog, bring_up, import_cache, set_quotas
from insitu.grid.catalog.orphaned_imports import find_ended_imports, list_staged_imports
from insitu.grid.importing import node_reader
from insitu.grid.importing.node_reader import cut_units, run_in_turn
from insitu.grid.intake.partition_builder import PartitionBuilders
from insitu.grid.intake.row_plan import Destination, RowPlan
from insitu.grid.intake.source_blocks import FileState
from insitu.grid.intake.unit_reader import Unit, count_rows, encode_options, read_unit
from insitu.grid.partitions import make_batch
from insitu.grid.serving import import_actions
from insitu.grid.sources import SourceOptions, UrlFile, open_sources
from insitu.grid.transfer import RemoteStores, StoresElsewhere, row_sending
from insitu.grid.transfer.client import PartitionClient
from insitu.grid.transfer.requests import RowsRequest

ROWS = 3000
PLAN = RowPlan(
    token="t-1",
    names=("d",),
    fractions=(1.0,),
    partitions=1,
    columns=(Column("x", "int64"),),
    labels=(),
    label_from="",
    key=None,
    block_rows=10,
    codec=None,
    drop_pages=False,
    primaries=(),
    destinations=(),
)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[StoreHosts]:
    with contextlib.closing(StoreHosts(tmp_path, "a", "b", "c")) as found:
        yield found


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units and blocks of few rows, so that few rows have several of them."""
    monkeypatch.setattr(node_reader, "UNIT_BYTES", 6000)
    monkeypatch.setattr("insitu.grid.intake.unit_reader.UNIT_BLOCK_BYTES", 2000)
    monkeypatch.setattr("insitu.grid.importing.importer.BLOCK_BYTES", 4000)
    monkeypatch.setattr("insitu.grid.intake.import_plan.BUFFER_BYTES", 0)


def make_table(first: int, rows: int) -> pa.Table:
    ids = range(first, first + rows)
    return pa.table({"id": ids, "half": [i / 2 for i in ids], "name": [f"row {i}" * (i % 4) for i in ids]})


def write_files(folder: Path, format: str) -> list[str]:
    """Three files of ROWS rows together."""
    folder.mkdir(exist_ok=True)
    for number in range(3):
        path, table = folder / f"{number}.{format}", make_table(number * ROWS // 3, ROWS // 3)
        if format == "npy":
            np.save(path, np.stack([table["id"].to_numpy(), table["half"].to_numpy()], axis=1))
        elif format == "npz":
            np.savez(path, id=table["id"].to_numpy())
        elif format == "parquet":
            pq.write_table(table, path, row_group_size=70)
        elif format == "csv":
            pa_csv.write_csv(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=100)
    return [str(folder)]


def import_here(tmp_path: Path, sources: list[str], **options: Any) -> CacheSpec:
    local = Paths(tmp_path / "local")
    bring_up(local, 3)
    (cache,) = import_cache(local, "d", sources, **options)
    return cache


def checksums(cache: CacheSpec) -> list[tuple[int, str]]:
    return [(info.rows, info.checksum) for info in cache.partitions]


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("npy", {"label_from_filename": True}),
        ("parquet", {"key": "name", "backups": 1}),
        ("csv", {"compress": "lz4"}),
        ("arrow", {}),
        ("csv", {"where": "id > 300", "row_id": "number", "sample": 0.5}),
        ("parquet", {"where": "id > 300", "row_id": "number", "columns": ("name",)}),
        ("parquet", {"row_id": "number", "sample": 0.3, "rename": ("id=key",), "dtype": ("id=str",)}),
        ("arrow", {"drop_nulls": ("all",), "row_id": "number", "fill": ("id=mean",)}),
        ("npy", {"sample": 0.5, "row_id": "number"}),
    ],
)
def test_what_nodes_read_from_paths_has_the_bytes_of_a_local_import(
    head: Paths, hosts: StoreHosts, tmp_path: Path, format: str, options: dict[str, Any]
) -> None:
    sources = write_files(tmp_path / "data", format)
    remote, seen = hosts.remote(), []

    def progress(rows: int, done: int, total: int | None) -> None:
        seen.append((rows, done, total))

    (cache,) = import_cache(
        head, "d", sources, partitions=6, remote=remote, read_on="nodes", progress=progress, **options
    )
    assert checksums(cache) == checksums(import_here(tmp_path, sources, partitions=6, **options))
    filters = options.keys() & {"where", "sample"}
    assert Catalog(head).get("d") == cache and (0 < cache.rows < ROWS if filters else cache.rows == ROWS)
    assert not remote.sent, "no row comes from here"
    assert seen[-1][0] == cache.rows and seen[-1][1] == seen[-1][2]
    for paths in hosts.paths.values():
        assert not list(paths.staging.iterdir())


@pytest.mark.parametrize("format", ["npy", "npz", "parquet", "csv", "arrow"])
def test_urls_are_read_by_the_nodes_of_a_cluster_and_here_without_one(
    head: Paths, hosts: StoreHosts, tmp_path: Path, format: str
) -> None:
    sources = write_files(tmp_path / "data", format)
    files = fsspec.filesystem("memory")
    folder = f"/imports/{tmp_path.name}"
    for path in (tmp_path / "data").iterdir():
        files.pipe(f"{folder}/{path.name}", path.read_bytes())
    remote = hosts.remote()
    options: dict[str, Any] = {"partitions": 3, "split": {"train": 0.8, "test": 0.2}}
    found = import_cache(head, "d", [f"memory:/{folder}"], remote=remote, **options)
    local = Paths(tmp_path / "local")
    bring_up(local, 3)
    expected = import_cache(local, "d", sources, **options)
    alone = import_cache(local, "e", [f"memory:/{folder}/*.{format}"], **options)
    for one, two, three in zip(found, expected, alone, strict=True):
        assert checksums(one) == checksums(two) == checksums(three)
    assert not remote.sent


def test_texts_that_are_too_long_for_blocks_begin_again(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.intake.import_plan.BUFFER_BYTES", 100_000)
    table = pa.table({"name": ["x" * (1 if i < 2000 else 100) for i in range(ROWS)]})
    pa_csv.write_csv(table, tmp_path / "a.csv")
    sources = [str(tmp_path / "a.csv")]
    plain = import_here(tmp_path, sources, partitions=2)
    monkeypatch.setattr("insitu.grid.intake.partition_builder.MOST_TEXT_BYTES", 20_000)
    for read_on in ("nodes", "here"):
        (cache,) = import_cache(head, read_on, sources, partitions=2, remote=hosts.remote(), read_on=read_on)
        assert [info.rows for info in cache.partitions] == [info.rows for info in plain.partitions]
        assert cache.block_rows < plain.block_rows


def test_files_that_only_some_hosts_see_are_named(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = write_files(tmp_path / "data", "npy")
    see = import_actions.ImportActions._see_files
    blind = hosts.servers[NodeId("b")].actions.imports

    def see_nothing(self: import_actions.ImportActions, fields: Any) -> Any:
        return ["/data/0.npy can't be read: No such file"] * 3 if self is blind else see(self, fields)

    monkeypatch.setattr(import_actions.ImportActions, "_see_files", see_nothing)
    for server in hosts.servers.values():
        actions = server.actions
        actions._actions = {**actions._actions, "see_files": lambda f, a=actions.imports: see_nothing(a, f)}
    with pytest.raises(
        SourceError, match=r"see them\. Received: files that this host sees and a, c, but not b"
    ):
        import_cache(head, "d", sources, remote=hosts.remote(), read_on="nodes")
    assert Catalog(head).find("d") is None and hosts.files("a") == {}
    import_cache(head, "d", sources, remote=hosts.remote(), read_on="here")


def test_a_file_that_changes_meanwhile_is_named(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = write_files(tmp_path / "data", "csv")
    number_rows = node_reader.NodeReading.number_rows

    def change(self: node_reader.NodeReading) -> None:
        number_rows(self)
        with (tmp_path / "data" / "2.csv").open("a") as file:
            file.write("1,2,x\n")

    monkeypatch.setattr(node_reader.NodeReading, "number_rows", change)
    with pytest.raises(SourceError, match=r"2\.csv must be the same file for all hosts"):
        import_cache(head, "d", sources, remote=hosts.remote(), read_on="nodes")
    assert Catalog(head).find("d") is None
    assert all(list_staged_imports(paths) == [] for paths in hosts.paths.values())


def test_nodes_need_a_cluster(paths: Paths, source: Path) -> None:
    with pytest.raises(InputError, match=r"--read-on nodes has the nodes .* Received: a home without one"):
        import_cache(paths, "d", [str(source)], read_on="nodes")
    with pytest.raises(InputError, match=r"--read-on must be nodes or here. Received: there"):
        import_cache(paths, "d", [str(source)], read_on="there")


def wait_for_blocks(hosts: StoreHosts) -> None:
    """Wait until each owner has written some whole blocks: it does so while others continue."""
    deadline = time.monotonic() + 60
    while True:
        files = [file for paths in hosts.paths.values() for file in paths.staging.rglob("part-*.arrow")]
        if len(files) == 6 and all(file.stat().st_size > 2 * 4096 for file in files):
            return
        assert time.monotonic() < deadline, [file.stat().st_size for file in files]
        time.sleep(0.01)


class Interrupted(Exception):
    """The import ends here."""


@pytest.mark.parametrize("read_on", ["nodes", "here"])
def test_an_import_onto_hosts_is_continued(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_on: str
) -> None:
    monkeypatch.setattr("insitu.grid.importing.import_journal.JOURNAL_BYTES", 1)
    sources = write_files(tmp_path / "data", "npy")
    options: dict[str, Any] = {"partitions": 3, "backups": 1, "resume": True, "read_on": read_on}

    def interrupt(rows: int, done: int, total: int | None) -> None:
        if rows == ROWS:
            wait_for_blocks(hosts)
            raise Interrupted

    with pytest.raises(Interrupted):
        import_cache(head, "d", sources, remote=hosts.remote(), progress=interrupt, **options)
    left = [each for paths in hosts.paths.values() for each in list_staged_imports(paths)]
    assert len(left) == 3 and find_ended_imports(head, left) == [], "--resume continues with it"
    hosts.stop("b")  # what its agent knows is lost, what it has staged isn't
    hosts.start("b")
    begun: list[int] = []
    begin_at = PartitionBuilders.begin_at

    def note(self: PartitionBuilders, rows: Any) -> None:
        begun.append(int(rows.sum()))
        begin_at(self, rows)

    monkeypatch.setattr(PartitionBuilders, "begin_at", note)
    (cache,) = import_cache(head, "d", sources, remote=hosts.remote(), **options)
    assert checksums(cache) == checksums(import_here(tmp_path, sources, partitions=3, backups=1))
    assert len(begun) > 3 and min(begun[:3]) > 0, "it doesn't begin from the start"
    assert all(list_staged_imports(paths) == [] for paths in hosts.paths.values())


def lose_answers(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Have some messages arrive without their sender hearing of it, each once. Returns what was lost."""
    send, lost = PartitionClient.send_rows, set()

    def send_rows(self: PartitionClient, request: Any, *arguments: Any) -> str:
        refused = send(self, request, *arguments)
        key = (str(self.address), request)
        if request.sequence % 2 == 0 and key not in lost:
            lost.add(key)
            raise TransferError("the link is away")
        return refused

    monkeypatch.setattr(PartitionClient, "send_rows", send_rows)
    monkeypatch.setattr(row_sending, "_PAUSE_SECONDS", 0.0)
    return lost


@pytest.mark.parametrize("read_on", ["nodes", "here"])
def test_rows_that_are_sent_twice_are_taken_once(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_on: str
) -> None:
    lost = lose_answers(monkeypatch)
    sources = write_files(tmp_path / "data", "parquet")
    (cache,) = import_cache(head, "d", sources, partitions=6, remote=hosts.remote(), read_on=read_on)
    assert lost and checksums(cache) == checksums(import_here(tmp_path, sources, partitions=6))


def test_copies_that_differ_end_the_import(
    head: Paths, hosts: StoreHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = row_sending._take
    changed: list[bool] = []

    def change(columns: Any, block: Any, rows: Any) -> dict[str, Any]:
        values = take(columns, block, rows)
        if not changed:
            changed.append(True)
            values["x"][0, 0] += 1
        return values

    monkeypatch.setattr(row_sending, "_take", change)
    sources = write_files(tmp_path / "data", "npy")
    with pytest.raises(
        GridError, match=r"All copies of a partition have the same bytes. Received: partition"
    ):
        import_cache(head, "d", sources, partitions=2, backups=2, remote=hosts.remote())
    assert Catalog(head).find("d") is None and hosts.files("a") == {}


def test_units_are_cut_where_reading_can_begin(tmp_path: Path) -> None:
    for format, least in (("npy", 2), ("parquet", 2), ("csv", 1)):
        write_files(tmp_path / format, format)
        files = [(path, format) for path in sorted((tmp_path / format).iterdir())]
        opened = open_sources(files, SourceOptions())
        states = [FileState.of(path) for path, _ in files]
        units = cut_units(opened, states)
        assert [unit.number for unit in units] == list(range(len(units)))
        assert len(units) >= 3 * least
        for path, _ in files:
            own = [unit for unit in units if unit.path == str(path)]
            ends = [unit.stop for unit in own]
            assert [unit.start for unit in own] == [0, *ends[:-1]]
            assert ends[-1] == (None if format == "csv" else ROWS // 3)
            assert Unit.from_json(own[0].to_json()) == own[0]
        assert count_rows(units[0], SourceOptions(), lambda size: None) == ROWS // 3


def test_nodes_take_units_in_turn_and_the_first_failure_stops_all() -> None:
    units = [Unit(i, "a", "csv", FileState(1, 1, 1), 0, None, 0) for i in range(20)]
    nodes, stopped = [NodeId("a"), NodeId("b")], []

    def number(node: NodeId, unit: Unit) -> int:
        return unit.number

    assert run_in_turn(nodes, units, number, lambda: stopped.append(1)) == list(range(20)) and not stopped

    def fail(node: NodeId, unit: Unit) -> int:
        raise SourceError(f"unit {unit.number}")

    failing: Callable[[NodeId, Unit], int] = fail
    with pytest.raises(SourceError, match=r"unit \d"):
        run_in_turn(nodes, units, failing, lambda: stopped.append(1))
    assert 1 <= len(stopped) <= 4


@pytest.mark.parametrize(
    "change",
    [{"path": ""}, {"format": "exe"}, {"number": -1}, {"state": {}}, {"start": "x"}, {"stop": [1]}],
)
def test_units_of_other_forms_are_refused(change: dict[str, Any]) -> None:
    unit = Unit(0, "/a.csv", "csv", FileState(1, 1, 1), 0, None, 0).to_json()
    with pytest.raises(InputError, match="A unit"):
        Unit.from_json({**unit, **change})


def test_a_unit_of_too_few_rows_is_named_without_what_its_url_hides() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    url = "memory://units/a.npy?sig=SECRET"
    fsspec.filesystem("memory").pipe("/units/a.npy?sig=SECRET", buffer.getvalue())
    unit = Unit(0, url, "npy", FileState.of(UrlFile(url)), 0, 9, 0)
    plan = replace(PLAN, destinations=(Destination("d", 0, (NodeId("a"),)),))
    with pytest.raises(SourceError, match=r"memory://units/a.npy must have 9 rows") as refused:
        read_unit(plan, unit, SourceOptions(), lambda block, where: None, lambda size: None)
    assert "SECRET" not in str(refused.value)


def test_a_node_without_the_import_refuses_to_read(hosts: StoreHosts, tmp_path: Path) -> None:
    remote: RemoteStores = hosts.remote()
    unit = Unit(0, "/a.csv", "csv", FileState(1, 1, 1), 0, None, 0)
    fields = {"unit": unit.to_json(), "token": "t", "owners": {}, "silence": 1, "options": {}}
    with pytest.raises(TransferError, match="Options of sources"):
        remote.ask(NodeId("a"), "read_rows", fields)
    fields["options"] = encode_options(SourceOptions())
    with pytest.raises(TransferError, match="was started again in the middle of the import"):
        remote.ask(NodeId("a"), "read_rows", fields)


def test_rows_of_other_forms_are_refused(hosts: StoreHosts) -> None:
    """What comes with the secret may still be wrong: nothing of it enters a partition."""
    remote, node = hosts.remote(), NodeId("a")
    plan = replace(PLAN, destinations=(Destination("d", 0, (node,)),), partitions=1)
    stores = StoresElsewhere(remote, plan, [node], [node])
    assert list(stores.open(adopt=False)) == [(0, 0)]
    stores.begin(0, np.zeros(1, np.int64))
    good = make_batch(plan.columns, 2, {"x": np.arange(2)})
    nulls = pa.RecordBatch.from_arrays([pa.array([1, None], pa.int64())], schema=good.schema)
    other = pa.RecordBatch.from_pydict({"y": [1.0, 2.0]})
    one, two = np.array([1]).tobytes(), np.array([2]).tobytes()
    with PartitionClient(hosts.servers[node].address, SECRET, silence=2.0) as client:
        for batch, counts, token in (
            (other, two, plan.token),
            (nulls, two, plan.token),
            (good, one, plan.token),
            (good, b"", plan.token),
            (good, two[:5], plan.token),
            (good, np.array([3, -1]).tobytes(), plan.token),
            (good, two, "another"),
        ):
            with pytest.raises(TransferError, match=r"refuses|failed"):
                client.send_rows(RowsRequest(token, 0, 0, False), batch, counts)
        assert client.send_rows(RowsRequest(plan.token, 0, 0, True), good, two) == ""
    ((number, owner, finished),) = stores.finish(1)
    assert (number, owner, finished.rows) == (0, node, 2)


def test_rows_count_for_the_quota_of_the_store(hosts: StoreHosts) -> None:
    remote, node = hosts.remote(), NodeId("a")
    plan = replace(PLAN, destinations=(Destination("d", 0, (node,)),), partitions=1)
    stores = StoresElsewhere(remote, plan, [node], [node])
    assert list(stores.open(adopt=False)) == [(0, 0)]
    stores.begin(0, np.zeros(1, np.int64))
    rows, counts = make_batch(plan.columns, 2, {"x": np.arange(2)}), np.array([2]).tobytes()
    with PartitionClient(hosts.servers[node].address, SECRET, silence=2.0) as client:
        assert client.send_rows(RowsRequest(plan.token, 0, 0, True), rows, counts) == ""
    set_quotas(hosts.paths[node], [node], quota=1)
    with pytest.raises(GridError, match=r"quota of a is 1 bytes. Received: rows for which it has no room"):
        stores.finish(1)
