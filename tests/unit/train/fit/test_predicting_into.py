"""Predictions of a model under the keys of the rows."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import insitu
from insitu.errors import InputError
from insitu.grid import import_cache
from insitu.paths import Paths
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


def test_outputs_have_names() -> None:
    one = np.ones((4, 1))
    assert name_outputs(None, one)["value"].shape == (4,)
    assert name_outputs(None, {"a": np.ones((4, 2))})["a"].shape == (4, 2)
    assert list(name_outputs(None, [one, one])) == ["output_0", "output_1"]
