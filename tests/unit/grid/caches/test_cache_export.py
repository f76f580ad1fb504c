"""Rows of a cache that are exported to files, folders and tables, and come back by an import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.base.wording import hide_password
from insitu.grid import export_rows, import_cache, read_blocks
from insitu.grid.caches import cache_export, export_tables
from insitu.grid.catalog import Catalog

ROWS = 600
SCALARS = ("id", "price", "small", "large", "flag", "half", "name")
TIMES = ("at", "zoned", "day", "clock", "lasting")
ALL = (*SCALARS, *TIMES, "vector", "image", "bits", "tokens")


def make_table() -> pa.Table:
    random = np.random.default_rng(1)
    return pa.table(
        {
            "id": np.arange(ROWS),
            "price": np.where(np.arange(ROWS) % 7 == 0, np.nan, random.normal(size=ROWS)).astype(np.float32),
            "small": random.integers(0, 256, ROWS).astype(np.uint8),
            "large": random.integers(0, 2**63, ROWS).astype(np.uint64),
            "flag": random.integers(0, 2, ROWS).astype(bool),
            "half": (random.normal(size=ROWS) + 0.1).astype(np.float16),
            "name": [f'n{n % 7} ä,"\n' if n % 3 else "" for n in range(ROWS)],
            "at": pa.array(np.arange(ROWS) * 10**9, pa.timestamp("us")),
            "zoned": pa.array(np.arange(ROWS) * 10**6, pa.timestamp("ms", "Europe/Rome")),
            "day": pa.array(np.arange(ROWS, dtype=np.int32), pa.date32()),
            "clock": pa.array(np.arange(ROWS, dtype=np.int32), pa.time32("ms")),
            "lasting": pa.array(np.arange(ROWS), pa.duration("us")),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(random.normal(size=ROWS * 3)), 3),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
                random.integers(0, 256, (ROWS, 4, 5)).astype(np.uint8)
            ),
            "bits": pa.FixedSizeListArray.from_arrays(pa.array(random.integers(0, 2, ROWS * 2) == 1), 2),
            "tokens": pa.array([list(range(n % 4)) for n in range(ROWS)], pa.list_(pa.int32())),
        }
    )


@pytest.fixture(params=[None, "zstd"])
def orders(paths: Paths, tmp_path: Path, request: pytest.FixtureRequest) -> CacheSpec:
    pq.write_table(make_table(), tmp_path / "source.parquet")
    options: Any = {"ragged": ["tokens"], "partitions": 3, "compress": request.param}
    return import_cache(paths, "orders", [str(tmp_path / "source.parquet")], **options)[0]


def read_all(paths: Paths, cache: CacheSpec) -> dict[str, list[Any]]:
    """All rows in their order, as bytes."""
    found: dict[str, list[Any]] = {column.name: [] for column in cache.columns}
    for block in read_blocks(paths, cache, list(found)):
        for name, values in block.values.items():
            is_array = isinstance(values, np.ndarray)
            found[name] += [v.tobytes() for v in values] if is_array else values.to_pylist()
    return found


@pytest.mark.parametrize("target", ["out.parquet", "out.arrow", "out/"])
def test_rows_come_back_equal(paths: Paths, orders: CacheSpec, tmp_path: Path, target: str) -> None:
    done = export_rows(paths, orders, f"{tmp_path}/{target}")
    assert (done.rows, done.sent, done.version) == (ROWS, ROWS, 1)
    (back,) = import_cache(paths, "back", [f"{tmp_path}/{target}"], partitions=1, ragged=["tokens"])
    assert back.columns == orders.columns
    assert read_all(paths, back) == read_all(paths, orders)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_values_of_csv_come_back_equal(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    export_rows(paths, orders, f"{tmp_path}/out.csv", columns=SCALARS)
    before = pa.Table.from_batches(
        [
            pa.RecordBatch.from_pydict({name: block.values[name] for name in SCALARS})
            for block in read_blocks(paths, orders, SCALARS)
        ]
    )
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    types = {f.name: pa.float32() if f.name == "half" else f.type for f in before.schema}
    convert = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False)
    after = pyarrow.csv.read_csv(tmp_path / "out.csv", parse_options=parse, convert_options=convert)
    for name in SCALARS:
        one, two = (np.asarray(table[name]) for table in (before, after))
        np.testing.assert_array_equal(two.astype(one.dtype), one)


def test_a_csv_file_has_one_value_a_cell(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vector, image, bits, tokens with several") as refused:
        export_rows(paths, orders, f"{tmp_path}/out.csv")
    advice = str(refused.value).rpartition("--columns ")[2]
    export_rows(paths, orders, f"{tmp_path}/out.csv", columns=advice.split(","))


def test_columns_rows_and_their_numbers_are_chosen(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    export_rows(paths, orders, str(path), columns=["price", "id"], limit=250, row_id="row")
    table = pq.read_table(path)
    assert table.column_names == ["row", "price", "id"] and table.num_rows == 250
    assert table["row"].to_pylist() == list(range(250))
    order = [int.from_bytes(each, sys.byteorder) for each in read_all(paths, orders)["id"]]
    assert table["id"].to_pylist() == order[:250]
    assert table.schema.metadata == {b"cache": b"orders", b"version": b"1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["id", "nothing"]}, "Received: id,nothing"),
        ({"columns": ["id", "id"]}, "each once"),
        ({"row_id": "id"}, "--row-id names a column that isn't there"),
        ({"row_id": ""}, "Received: ''"),
    ],
)
def test_options_that_fit_no_column_are_refused(
    paths: Paths, orders: CacheSpec, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export_rows(paths, orders, f"{tmp_path}/out.parquet", **options)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("target", ["out.parquet", "out.csv", "out.arrow", "out/"])
def test_what_is_there_stays_until_the_new_one_is_whole(
    paths: Paths, orders: CacheSpec, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{tmp_path}/{target}"
    export_rows(paths, orders, place, columns=["id"], limit=10)
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="--overwrite"):
        export_rows(paths, orders, place, columns=["id"])
    make = cache_export.make_batch

    def interrupt(*given: Any) -> Any:
        if given[3][0] > 0:
            raise KeyboardInterrupt
        return make(*given)

    with monkeypatch.context() as patched:
        patched.setattr(cache_export, "make_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_rows(paths, orders, place, columns=["id"], overwrite=True)
    assert snapshot(tmp_path) == before
    export_rows(paths, orders, place, columns=["id"], overwrite=True)
    assert snapshot(tmp_path) != before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def snapshot(folder: Path) -> dict[str, bytes]:
    found = {str(p): p.read_bytes() for p in folder.rglob("out*") if p.is_file()}
    return found | {str(p): p.read_bytes() for p in folder.rglob("out/*")}


def test_a_file_that_appears_meanwhile_is_kept(
    paths: Paths, orders: CacheSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tmp_path / "out.parquet", cache_export.make_batch

    def appear(*given: Any) -> Any:
        path.write_text("mine")
        return make(*given)

    monkeypatch.setattr(cache_export, "make_batch", appear)
    with pytest.raises(InputError, match="is there already"):
        export_rows(paths, orders, str(path))
    assert path.read_text() == "mine"


def test_a_folder_of_others_is_not_replaced(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    for overwrite, message in ((False, "is there already"), (True, r"holds thesis\.txt")):
        with pytest.raises(InputError, match=message):
            export_rows(paths, orders, f"{folder}/", overwrite=overwrite)
    assert (folder / "thesis.txt").read_text() == "mine"
    for target, message in (
        (f"{tmp_path}/no/out.csv", "folder that is there"),
        (f"{folder}.parquet", "alone"),
    ):
        Path(f"{folder}.parquet").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=message):
            export_rows(paths, orders, target, columns=["id"], overwrite=True)


def test_names_of_classes_come_along(paths: Paths, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        np.save(tmp_path / f"{name}.npy", np.zeros((8, 4), np.uint8))
    (pets,) = import_cache(paths, "pets", [str(tmp_path)], label_from_filename=True)
    export_rows(paths, pets, f"{tmp_path}/out.parquet")
    field = pq.read_table(tmp_path / "out.parquet").schema.field("label")
    assert field.metadata[b"labels"] == b'["cat", "dog"]' and field.type == pa.int64()


def test_progress_ends_with_all_bytes(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export_rows(paths, orders, f"{tmp_path}/a.arrow", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == orders.raw_bytes and seen == sorted(seen)


# Delta Lake


def read_delta(path: Path) -> dict[str, list[Any]]:
    import deltalake

    table = deltalake.DeltaTable(str(path)).to_pyarrow_table()
    return {name: table[name].to_pylist() for name in table.column_names}


def expected(paths: Paths, cache: CacheSpec, names: tuple[str, ...]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in names}
    for block in read_blocks(paths, cache, names):
        for column in cache.columns:
            if column.name in names:
                values = block.values[column.name]
                lists = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
                if column.dtype.endswith("[*]"):
                    lists = [np.frombuffer(each, np.int32).tolist() for each in lists]
                found[column.name] += lists
    return found


def test_a_table_of_delta_lake_has_equal_rows(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    address = f"delta://{tmp_path}/table"
    done = export_rows(paths, orders, address, row_id="row")
    assert done.address == address
    found = read_delta(tmp_path / "table")
    order = np.argsort(found.pop("row"))  # its tables have none
    assert order.size == ROWS
    found = {name: [values[place] for place in order] for name, values in found.items()}
    for name, values in expected(paths, orders, ALL).items():
        if name == "price":  # NaN
            np.testing.assert_array_equal(np.array(found[name]), np.array(values))
        else:
            assert found[name] == values, name
    with pytest.raises(InputError, match="--overwrite"):
        export_rows(paths, orders, address)
    export_rows(paths, orders, address, columns=["id"], overwrite=True)
    assert list(read_delta(tmp_path / "table")) == ["id"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SourceError("away")])
def test_an_interrupted_table_of_delta_lake_is_as_it_was(
    paths: Paths, orders: CacheSpec, tmp_path: Path, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deltalake")
    make = cache_export.make_batch

    def fail(*given: Any) -> Any:
        if given[3][0] > 0:
            raise error
        return make(*given)

    with monkeypatch.context() as patched:
        patched.setattr(cache_export, "make_batch", fail)
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            export_rows(paths, orders, f"delta://{tmp_path}/new", columns=["id"])
    assert not (tmp_path / "new").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    export_rows(paths, orders, f"delta://{tmp_path}/there", columns=["id"], limit=3)
    with monkeypatch.context() as patched:
        patched.setattr(cache_export, "make_batch", fail)
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            export_rows(paths, orders, f"delta://{tmp_path}/there", columns=["id"], overwrite=True)
    assert len(read_delta(tmp_path / "there")["id"]) == 3


def test_numbers_that_a_table_lacks_are_refused(paths: Paths, tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    np.savez(tmp_path / "n.npz", n=np.array([1, 2**63], np.uint64))
    (cache,) = import_cache(paths, "n", [str(tmp_path / "n.npz")])
    with pytest.raises(InputError, match=r"below 2\*\*63\. Received: column n"):
        export_rows(paths, cache, f"delta://{tmp_path}/table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [("s3://bucket/table", "a folder of this machine"), ("", "a folder"), ("{}/a/b", "Make .*/a first"),
     ("{}/source.parquet", "another thing"), ("{}/home", "another thing")],
)  # fmt: skip
def test_other_tables_of_delta_lake_are_refused(
    paths: Paths, orders: CacheSpec, tmp_path: Path, path: str, message: str
) -> None:
    pytest.importorskip("deltalake")
    with pytest.raises(InputError, match=message):
        export_rows(paths, orders, f"delta://{path.format(tmp_path)}", overwrite=True)


# PostgreSQL, without a server. With one: tests/process/test_export_postgresql.py


@pytest.mark.parametrize(
    ("scheme", "module"), [("delta", "deltalake"), ("postgresql", "adbc_driver_postgresql")]
)
def test_a_missing_library_is_named(
    paths: Paths, orders: CacheSpec, scheme: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'insitu\[{scheme}\]'"):
        export_rows(paths, orders, f"{scheme}://host/database/table")


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:s3cr3t@host/db/t",
        "postgresql://me:s3c@r3t@host/db/t",
        "postgresql://me:s3/cr3t@host/db/t",
        "postgresql://me:s3#c?r3t@host/db/t",
        "postgresql://me:s3cr3t@[::1/db/t",
        "postgresql://host/db/t?user=me&password=s3cr3t",
        "postgresql://me@host/db/t?sslpassword=s3cr3t&x=1",
    ],
)
def test_passwords_are_hidden(
    paths: Paths, orders: CacheSpec, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = hide_password(address)
    assert "s3" not in shown and "r3t" not in shown and "***" in shown

    class Driver:
        class Error(Exception):
            pass

        def connect(self, uri: str) -> Any:
            raise self.Error(f"no server for {uri}")

    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", type(sys)("adbc_driver_postgresql"))
    module = type(sys)("adbc_driver_postgresql.dbapi")
    module.__dict__.update(connect=Driver().connect, Error=Driver.Error)
    sys.modules["adbc_driver_postgresql"].dbapi = module
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql.dbapi", module)
    with pytest.raises((InputError, SourceError)) as refused:
        export_rows(paths, orders, address, columns=["id"])
    assert "s3" not in str(refused.value) and "r3t" not in str(refused.value)


@pytest.mark.parametrize("rest", ["host", "host/db", "host/db/", "/db/t", "host/db/a/b", "host/db/a."])
def test_a_table_of_postgresql_has_a_whole_address(paths: Paths, orders: CacheSpec, rest: str) -> None:
    with pytest.raises(InputError, match=r"DATABASE/\[SCHEMA\.\]TABLE"):
        export_rows(paths, orders, f"postgresql://{rest}")


def test_a_library_that_reads_in_a_thread_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes to the main thread while the library reads in another."""
    import threading

    schema, started, ended = pa.schema([("x", pa.int64())]), threading.Event(), list[str]()
    batch = pa.RecordBatch.from_pydict({"x": [1]}, schema)

    def endless() -> Iterator[tuple[int, pa.RecordBatch]]:
        while True:
            started.set()
            yield 0, batch

    def write(reader: Any) -> None:
        try:
            for _ in reader:
                pass
        except Exception as error:
            ended.append(str(error))
            raise

    join: Callable[..., None] = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is None:
            started.wait()
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_tables._Feed(schema, endless(), flat=False).run(write)
    assert len(ended) == 1 and "interrupted" in ended[0]


def test_a_version_that_is_named_is_exported(paths: Paths, orders: CacheSpec, tmp_path: Path) -> None:
    catalog = Catalog(paths)
    catalog.pin("orders", 1, "job")
    np.savez(tmp_path / "n.npz", n=np.arange(4))
    import_cache(paths, "orders", [str(tmp_path / "n.npz")], overwrite=True)
    done = export_rows(paths, catalog.get_named("orders@1"), f"{tmp_path}/out.parquet")
    assert (done.version, done.rows) == (1, ROWS)
    assert export_rows(paths, catalog.get_named("orders"), f"{tmp_path}/new.parquet").rows == 4
