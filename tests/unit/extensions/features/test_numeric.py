from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError


def test_numbers_are_normalized_in_the_shape_of_their_column():
    shapes = []

    def halve(values: np.ndarray) -> np.ndarray:
        shapes.append(values.shape)
        return values / 2

    column = fc.numeric_column("k", shape=(2, 1), normalizer_fn=halve)
    assert column.read({"k": [[[2], [4]]]}).tolist() == [[1, 2]]
    assert shapes == [(1, 2, 1)] and column.width == 2
    assert column.read({"k": [[[2], [4]]]}).dtype == np.float32


def test_a_default_fills_batches_without_the_feature():
    assert fc.numeric_column("k", default_value=3).read({"other": [1, 2]}).tolist() == [[3], [3]]
    assert fc.numeric_column("k", shape=2, default_value=(1, 2)).read({"o": [0]}).tolist() == [[1, 2]]
    with pytest.raises(InputError, match="'k'"):
        fc.numeric_column("k").read({"other": [1, 2]})


def test_settings_say_what_fills():
    assert fc.numeric_column("k").get_config()["default_value"] is None
    assert fc.numeric_column("k", shape=2, default_value=(1, 2)).get_config()["default_value"] == [1, 2]


def test_what_is_no_number_names_its_row():
    with pytest.raises(InputError, match="NaN in row 2 of the batch, in feature 'k'"):
        fc.numeric_column("k").read({"k": [0.0, 1.0, np.nan]})
    filled = fc.numeric_column("k", normalizer_fn=np.nan_to_num)
    assert filled.read({"k": [np.nan]}).tolist() == [[0]]


def test_a_normalizer_keeps_the_shape():
    with pytest.raises(InputError, match=r"shape \(2,\) for \(2, 1\)"):
        fc.numeric_column("k", normalizer_fn=lambda values: values[:, 0]).read({"k": [1, 2]})


def test_a_dtype_takes_nothing_away_from_the_numbers():
    whole = fc.numeric_column("k", dtype="int64")
    assert whole.read({"k": np.array([0.75, 1e30, -np.inf], "float32")})[:, 0].tolist() == [
        0.75,
        float(np.float32(1e30)),
        -np.inf,
    ]
    since = fc.numeric_column("k", normalizer_fn=lambda seconds: seconds - 1_700_000_000)
    for kind in ("int64", "float64"):
        assert since.read({"k": np.array([1_700_000_001], kind)}).tolist() == [[1]]
    short = fc.numeric_column("k", dtype="int32")
    assert short.read({"k": np.array([2], ml_dtypes.bfloat16)}).tolist() == [[2]]
