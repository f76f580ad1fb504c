"""Predictions under the keys of their rows, in Ignite (servers in this process) and in caches of insitu."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid_jobs import job_context, write_own_map
from ignite_wire import FakeCache, cluster_of

from insitu.context import Context
from insitu.errors import InputError
from insitu.grid import Dataset, KeyReader, dataset, import_cache, open_target
from insitu.grid.ignite import cluster as cluster_module
from insitu.paths import Paths

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
    keys = KeyReader(ds, key)
    written = open_target(target, ds, context, keys.column, None)
    for shard in ds.shards:
        for batch in ds.shard_batches(shard, 0) if not written.has(shard) else ():
            if batch.rows:
                values = {name: make(batch.data) for name, make in outputs.items()}
                written.write(shard, keys.read(shard, batch), values)
        written.complete(shard)
    written.close(whole=True)


def all_of(paths: Paths, name: str) -> dict[str, Any]:
    found = dataset(name, paths=paths, context=Context(paths), label=None).sample(1000)
    order = np.argsort(found["key"])
    return {column: values[order] for column, values in found.items()}


def test_keys_are_those_of_the_rows_in_any_order(paths: Paths, drawn: str) -> None:
    ds = dataset(drawn, features="x", paths=paths, context=Context(paths)).shuffle(3).batch(7)
    for key, form in (("key", int), ("name", str)):
        reader = KeyReader(ds, key)
        for batch in ds.shard_batches(0, 0):
            assert [form(each) for each in reader.read(0, batch)] == [form(int(x / 2)) for x in batch.data]


def test_a_column_that_cant_be_keys_is_refused(paths: Paths, drawn: str) -> None:
    ds = dataset(drawn, features="x", paths=paths, context=Context(paths)).batch(7)
    with pytest.raises(InputError, match="no column 'id' but key, x, name"):
        KeyReader(ds, "id")
    with pytest.raises(InputError, match="whole numbers or text"):
        KeyReader(ds, "x")
    with pytest.raises(InputError, match="type_name is a class of Ignite"):
        open_target("own", ds, Context(paths), KeyReader(ds, None).column, "Score")


def test_predictions_go_into_a_cache(paths: Paths, drawn: str) -> None:
    context = Context(paths)
    ds = dataset(drawn, features="x", paths=paths, context=context).shuffle(1).batch(30)
    predict(ds, "own", context, value=lambda x: x * 2, grid=lambda x: np.repeat(x, 6).reshape(-1, 2, 3))
    found = all_of(paths, "own")
    np.testing.assert_array_equal(found["key"], np.arange(100) + 1000)
    np.testing.assert_array_equal(found["value"], 4.0 * found["key"])
    assert found["grid"].shape == (100, 2, 3)


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
    from insitu.grid import predictions

    predictions._calls.clear()  # another task
    predict(ds, "own-0", context, **double)
    found = all_of(paths, "own-0")
    np.testing.assert_array_equal(found["value"], 4.0 * (np.arange(100) + 1000))
    predictions._calls.clear()  # a task that is started again finds its part
    predict(ds, "own-0", context, value=lambda x: 1 / 0)
