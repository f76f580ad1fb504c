"""Predictions of a model under the keys of the rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import keras
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.base.paths import Paths
from insitu.grid import Catalog, export_rows, import_cache
from insitu.train.fit.predicting_into import name_outputs


def test_each_prediction_lies_under_the_key_of_its_row(home: Path, tmp_path: Path) -> None:
    keys = np.arange(50) + 7
    np.savez(tmp_path / "rows.npz", key=keys, x=(keys * 2).astype(np.float32), label=keys % 3)
    import_cache(Paths(home), "rows", [str(tmp_path / "rows.npz")], partitions=2)
    with insitu.OneDeviceStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "linear", False, "ones")])
        model.compile("sgd", "mse")
    rows = insitu.dataset("rows", features="x").shuffle(1).batch(16).map(lambda x, y: (x[:, None], y))
    assert insitu.predict_into(model, rows, "predicted") == 50
    found = insitu.dataset("predicted", label=None).sample(50)
    np.testing.assert_array_equal(np.sort(found["key"]), keys)
    np.testing.assert_array_equal(found["value"], 2.0 * found["key"])
    with pytest.raises(InputError, match="of one pass"):
        insitu.predict_into(model, rows.repeat(2), "predicted")


@pytest.mark.parametrize("end", [".parquet", ".csv", ""])
def test_predictions_join_exported_rows_by_the_number(home: Path, tmp_path: Path, end: str) -> None:
    values = np.random.default_rng(0).normal(size=200).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=values, label=np.arange(200))
    (cache,) = import_cache(Paths(home), "rows", [str(tmp_path / "rows.npz")], partitions=3)
    with insitu.OneDeviceStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "linear", False, "ones")])
        model.compile("sgd", "mse")
    rows = insitu.dataset("rows", features="x").shuffle(1).batch(16).map(lambda x, y: (x[:, None], y))
    target = f"{tmp_path}/predicted{end}" if end else "predicted"
    insitu.predict_into(model, rows, target)
    if not end:
        target = f"{tmp_path}/predicted.parquet"
        export_rows(Paths(home), Catalog(Paths(home)).get("predicted"), target)
    export_rows(Paths(home), cache, f"{tmp_path}/rows.parquet", row_id="row")
    predicted = pyarrow.csv.read_csv(target) if end == ".csv" else pq.read_table(target)
    joined = pq.read_table(tmp_path / "rows.parquet").join(predicted, "row", join_type="full outer")
    assert joined.num_rows == 200 and not joined["value"].null_count and not joined["x"].null_count
    np.testing.assert_allclose(joined["value"].to_numpy(), joined["x"].to_numpy(), rtol=1e-6)


def test_rows_without_keys_are_named_by_number(home: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.ones((50, 2), np.float32), label=np.arange(50))
    import_cache(Paths(home), "rows", [str(tmp_path / "rows.npz")], partitions=4)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    here = dataclasses.replace(insitu.context(), shards=(1,), num_shards=2)
    rows = insitu.grid.dataset("rows", context=here).batch(16)
    target = str(tmp_path / "predicted.parquet")
    with pytest.raises(TrainingError, match=r"1 of 2 shards.*all_shards"):
        insitu.predict_into(model, rows, target)
    assert insitu.predict_into(model, rows.all_shards(), target) == 50
    table = pq.read_table(target)
    assert table.column_names == ["row", "value"]
    assert sorted(table["row"].to_pylist()) == list(range(50))


def test_outputs_have_names() -> None:
    one = np.ones((4, 1))
    assert name_outputs(None, one)["value"].shape == (4,)
    assert name_outputs(None, {"a": np.ones((4, 2))})["a"].shape == (4, 2)
    assert list(name_outputs(None, [one, one])) == ["output_0", "output_1"]
