"""Imports from tables of other libraries: pandas, Polars, Delta, and so on. Run by `make test-stores`."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import insitu
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.grid import sample_rows

for _library in ("pandas", "polars", "datasets", "deltalake", "pyiceberg", "adbc_driver_sqlite"):
    pytest.importorskip(_library, reason=f"make test-stores installs {_library}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "home"))


def read(source: Any, **options: Any) -> dict[str, list[Any]]:
    """Import, and return all rows by column, in the order of the first one."""
    insitu.import_data("c", source, overwrite=True, **options)
    sample = sample_rows(Paths.default(), "c", 10**6)
    columns = {
        name: each.to_pylist() if hasattr(each, "to_pylist") else each.tolist()
        for name, each in sample.columns.items()
    }
    order = np.argsort(next(iter(columns.values())), kind="stable")
    return {name: [values[place] for place in order] for name, values in columns.items()}


def test_data_frames() -> None:
    import pandas as pd
    import polars as pl

    frame = pd.DataFrame(
        {
            "a": [1, 2, 3],
            "t": ["x", None, "z"],
            "at": pd.date_range("2020", periods=3),
            "c": pd.Categorical(["u", "v", "u"]),
            "n": pd.array([1, None, 3], dtype="Int64"),
        }
    )
    with pytest.raises(SourceError, match=r"in Python is fill=\['t=null', 'n=null'\]"):
        read(frame)
    wanted = {
        "a": [1, 2, 3],
        "t": ["x", "?", "z"],
        "at": [1577836800000000, 1577923200000000, 1578009600000000],
        "c": ["u", "v", "u"],
        "n": [1, 2, 3],
    }
    assert read(frame, fill={"t": "?", "n": "mean"}) == wanted
    assert read(pl.from_pandas(frame), fill={"t": "?", "n": "mean"}) == wanted
    with pytest.raises(InputError, match="of one type"):
        read(pd.DataFrame({"x": [1, "a"]}))


def test_datasets_of_hugging_face() -> None:
    import datasets

    data = datasets.Dataset.from_dict({"i": list(range(3000)), "text": [f"t{i}" for i in range(3000)]})
    found = read(data.shuffle(seed=1))
    assert found["i"] == list(range(3000)) and found["text"][7] == "t7"
    assert read(data.to_iterable_dataset())["i"] == list(range(3000))
    with pytest.raises(InputError, match=r"Pass one, such as dataset\['train'\]"):
        read(datasets.DatasetDict(train=data))


def test_versions_of_a_delta_table(tmp_path: Path) -> None:
    import deltalake

    folder = str(tmp_path / "delta")
    first = pa.table({"id": [1, 2, 3], "x": [0.5, None, 2.0], "p": ["a", "b", "a"]})
    deltalake.write_deltalake(folder, first, partition_by=["p"])
    deltalake.write_deltalake(folder, pa.table({"id": [4], "x": [1.0], "p": ["c"]}), mode="append")
    deltalake.DeltaTable(folder).delete("id = 2")
    assert read(folder) == {"id": [1, 3, 4], "x": [0.5, 2.0, 1.0], "p": ["a", "a", "c"]}
    assert read(f"delta://{folder}", table_version="1", columns=["id"]) == {"id": [1, 2, 3, 4]}
    assert read(folder, table_version="0", where='p == "a"', columns=["id"]) == {"id": [1, 3]}
    with pytest.raises(SourceError, match="can't be read"):
        read(folder, table_version="9")
    with pytest.raises(InputError, match="is a number"):
        read(folder, table_version="x")


def test_snapshots_of_an_iceberg_table(tmp_path: Path) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    (tmp_path / "ice").mkdir()
    catalog = SqlCatalog("d", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/ice")
    catalog.create_namespace("n")
    table = catalog.create_table("n.t", schema=pa.schema([("a", pa.int64()), ("s", pa.string())]))
    table.append(pa.table({"a": [1, 2], "s": ["x", "y"]}))
    before = table.current_snapshot()
    table.append(pa.table({"a": [3], "s": ["z"]}))
    folder = table.location().removeprefix("file://")
    assert read(folder) == {"a": [1, 2, 3], "s": ["x", "y", "z"]}
    assert before is not None
    assert read(folder, table_version=str(before.snapshot_id)) == {"a": [1, 2], "s": ["x", "y"]}
    with pytest.raises(SourceError, match="no snapshot"):
        read(folder, table_version="7")


def test_rows_of_a_database(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "o.db")
    connection.execute("create table orders(id integer, price real, city text)")
    rows = [(i, None if i % 10 == 0 else i / 2, f"c{i}") for i in range(5000)]
    connection.executemany("insert into orders values(?, ?, ?)", rows)
    connection.commit()
    connection.close()
    url = f"sqlite://{tmp_path}/o.db"
    found = read(url, sql="select id, price, city from orders where id >= 2000;")
    assert found["id"] == list(range(2000, 5000)) and found["city"][0] == "c2000"
    np.testing.assert_equal(found["price"][:2], [np.nan, 1000.5])
    assert read(url, sql="select id from orders", limit=7)["id"] == list(range(7))
    for sql, message in (
        ("select nope from orders", "no such column"),
        ("drop table orders", "can't be read"),
    ):
        with pytest.raises(SourceError, match=message):
            read(url, sql=sql)
    assert read(url, sql="select count(*) as n from orders") == {"n": [5000]}
