"""Predictions under the keys of their rows, in Ignite (servers in this process) and in caches of insitu."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from grid_jobs import job_context, write_own_map
from ignite_wire import FakeCache, cluster_of

from insitu.base.context import Context
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.extensions.ignite import cluster as cluster_module
from insitu.grid import Dataset, IdReader, dataset, import_cache, open_target

SHARDS = ((0, 1), (2, 3))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "1")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))


@pytest.fixture
def drawn(paths: Paths, tmp_path: Path) -> str:
    keys = np.arange(100) + 1000
    np.savez(tmp_path / "rows.npz", key=keys, x=keys * 2.0, name=keys.astype(str))
    import_cache(paths, "drawn", [str(tmp_path / "rows.npz")], partitions=4)
    return "drawn"


def predict(ds: Dataset, target: str, context: Context, key: str | None = None, **outputs: Any) -> None:
    """Do what `predict_into` does, with a model that doubles."""
    ids = IdReader(ds, key)
    written = open_target(target, ds, context, ids.key, None)
    whole = False
    try:
        for shard in ds.shards:
            for batch in ds.shard_batches(shard, 0) if not written.has(shard) else ():
                if batch.rows:
                    values = {name: make(batch.data) for name, make in outputs.items()}
                    written.write(shard, ids.read(shard, batch), values)
            written.complete(shard)
        whole = True
    finally:
        written.close(whole=whole)


def all_of(paths: Paths, name: str) -> dict[str, Any]:
    found = dataset(name, paths=paths, context=Context(paths), label=None).sample(1000)
    order = np.argsort(found["key"])
    return {column: values[order] for column, values in found.items()}


def test_keys_are_those_of_the_rows_in_any_order(paths: Paths, drawn: str) -> None:
    ds = dataset(drawn, features="x", paths=paths, context=Context(paths)).shuffle(3).batch(7)
    for key, form in (("key", int), ("name", str)):
        reader = IdReader(ds, key)
        for batch in ds.shard_batches(0, 0):
            assert [form(each) for each in reader.read(0, batch)["key"]] == [
                form(int(x / 2)) for x in batch.data
            ]


def test_a_column_that_cant_be_keys_is_refused(paths: Paths, drawn: str) -> None:
    ds = dataset(drawn, features="x", paths=paths, context=Context(paths)).batch(7)
    with pytest.raises(InputError, match="no column 'id' but key, x, name"):
        IdReader(ds, "id")
    with pytest.raises(InputError, match="whole numbers or text"):
        IdReader(ds, "x")
    with pytest.raises(InputError, match="type_name is a class of another system"):
        open_target("own", ds, Context(paths), IdReader(ds, None).key, "Score")


def test_predictions_go_into_a_cache(paths: Paths, drawn: str) -> None:
    context = Context(paths)
    ds = dataset(drawn, features="x", paths=paths, context=context).shuffle(1).batch(30)
    predict(ds, "own", context, value=lambda x: x * 2, grid=lambda x: np.repeat(x, 6).reshape(-1, 2, 3))
    found = all_of(paths, "own")
    np.testing.assert_array_equal(found["key"], np.arange(100) + 1000)
    np.testing.assert_array_equal(found["value"], 4.0 * found["key"])
    assert found["grid"].shape == (100, 2, 3)


@pytest.fixture
def unnamed(paths: Paths, tmp_path: Path) -> str:
    """A cache without keys, and with equal rows."""
    np.savez(tmp_path / "unnamed.npz", x=np.arange(100) // 2 * 1.0, label=np.arange(100) % 10)
    import_cache(paths, "unnamed", [str(tmp_path / "unnamed.npz")], partitions=4)
    return "unnamed"


@pytest.mark.parametrize("target", ["out.parquet", "out.csv", "out/in-a-cache"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_predictions_join_their_rows_by_number(
    paths: Paths, unnamed: str, target: str, shuffle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = Context(paths)
    ds = dataset(unnamed, features="x", paths=paths, context=replace(here, shards=(0, 1), num_shards=2))
    ds = (ds.shuffle(1) if shuffle else ds).batch(30)
    predict(ds, target, here, value=lambda batch: batch[0] * 3, pair=lambda batch: np.stack([*batch], 1))
    rows = dataset(unnamed, features=["row", "x"], paths=paths, context=here).batch(100)
    (((features, labels)),) = list(rows)
    if "." in target:
        joined = (pc.read_csv if target.endswith("csv") else pq.read_table)(target).sort_by("row")
        names = ["pair_0", "pair_1"] if target.endswith("csv") else ["pair"]
        assert joined.column_names == ["row", "value", *names]
        pairs = np.array([list(row.values()) for row in joined.select(names).to_pylist()]).reshape(-1, 2)
        assert not [name for name in os.listdir() if name.startswith(".")]
    else:
        joined = dataset(target, paths=paths, context=here, label=None).sample(100)
        order = np.argsort(joined["row"])
        joined = {name: values[order] for name, values in joined.items()}
        pairs = joined["pair"]
    np.testing.assert_array_equal(joined["row"], np.arange(100))
    np.testing.assert_array_equal(joined["value"], 3 * features["x"])
    np.testing.assert_array_equal(pairs, np.stack([features["x"], labels], 1))


def test_ids_are_never_ambiguous(paths: Paths, unnamed: str, tmp_path: Path) -> None:
    here = Context(paths)
    ds = dataset(unnamed, features="x", paths=paths, context=here).batch(50)
    parquet = str(tmp_path / "out.parquet")
    with pytest.raises(InputError, match=r"ids of rows.*\(row\)"):
        predict(ds, parquet, here, row=lambda batch: batch[0])
    with pytest.raises(InputError, match="a folder that exists"):
        predict(ds, str(tmp_path / "none" / "out.csv"), here)
    twice = {"a": lambda batch: np.stack(batch, 1), "a_0": lambda batch: batch[0]}
    with pytest.raises(InputError, match="Received: a_0 of two outputs"):
        predict(ds, str(tmp_path / "out.csv"), here, **twice)
    # A column `row` is no number of the row: it is a key if the script says so.
    np.savez(tmp_path / "own.npz", row=np.arange(100) + 7, x=np.arange(100) + 7)
    import_cache(paths, "own", [str(tmp_path / "own.npz")], partitions=4)
    own = dataset("own", features=["row", "x"], label=None, paths=paths, context=here).batch(50)
    assert all(np.array_equal(batch["row"], batch["x"]) for batch in own)
    with pytest.raises(InputError, match="no column 'key' but row, x"):
        predict(own, parquet, here)
    predict(own, parquet, here, key="row", value=lambda batch: batch["x"])
    found = pq.read_table(parquet)
    assert found.column_names == ["key", "value"] and found["key"].equals(found["value"])


def test_a_file_names_the_version_of_its_rows(paths: Paths, drawn: str, tmp_path: Path) -> None:
    ds = dataset(drawn, features="x", paths=paths, context=Context(paths)).batch(50)
    predict(ds, str(tmp_path / "out.parquet"), Context(paths), value=lambda x: x * 2)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["row", "key", "value"]
    assert table.schema.metadata[b"cache"] == b"drawn"
    assert table.schema.metadata[b"version"] == b"1"


def test_predictions_go_into_ignite_twice_as_once(paths: Paths, drawn: str) -> None:
    context = Context(paths)
    ds = dataset(drawn, features="x", paths=paths, context=context).batch(30)
    with cluster_of(2, FakeCache([[] for _ in range(4)], name="OUT")) as cluster:
        for _ in range(2):
            predict(ds, cluster.address(), context, value=lambda x: x.astype(np.float32))
        assert cluster.cache.rows == 100
        (back,) = import_cache(paths, "back", [cluster.address()])
    found = all_of(paths, "back")
    np.testing.assert_array_equal(found["value"], 2.0 * found["key"])
    assert back.columns[1].dtype == "float32"


def test_the_task_that_completes_the_parts_imports_them(paths: Paths, drawn: str) -> None:
    write_own_map(paths, ("node-0", "node-0"), SHARDS, drawn)
    job = paths.job("job-1")
    context = replace(job_context(paths), cache=drawn, num_shards=2)
    job.spec.write_text(json.dumps({}))
    double = {"value": lambda x: x * 2}
    for shard in (0, 1):
        here = replace(context, shards=(shard,))
        ds = dataset(drawn, features="x", context=here).batch(16)
        predict(ds, f"own-{shard}", here, **double)
        assert not job.predictions(f"own-{shard}", 0).joinpath("done.json").exists()
    ds = dataset(drawn, features="x", context=replace(context, shards=(1,))).batch(16)
    from insitu.grid.caches import predictions

    predictions._calls.clear()  # another task
    predict(ds, "own-0", context, **double)
    found = all_of(paths, "own-0")
    np.testing.assert_array_equal(found["value"], 4.0 * (np.arange(100) + 1000))
    predictions._calls.clear()  # a task that is started again finds its part
    predict(ds, "own-0", context, value=lambda x: 1 / 0)
