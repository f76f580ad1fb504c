from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.extensions.features.column_layer import column_from_config, column_to_config


@keras.saving.register_keras_serializable(package="test")
def minus_one(values):
    return values - 1


def test_a_column_comes_back_equal(tmp_path: Path):
    (tmp_path / "v.txt").write_text("a\nb\r\n")
    numbers = fc.numeric_column("x", shape=(2,), default_value=1.5, dtype="float64", normalizer_fn=minus_one)
    filed = fc.categorical_column_with_vocabulary_file("f", tmp_path / "v.txt", num_oov_buckets=2)
    cross = fc.crossed_column(
        ["x2", filed, fc.bucketized_column(fc.numeric_column("y"), [1, 2])], 9, hash_key=3
    )
    for column in (
        numbers,
        filed,
        cross,
        fc.indicator_column(fc.weighted_categorical_column(cross, "w")),
        fc.indicator_column(fc.categorical_column_with_identity("i", 4, default_value=0)),
        fc.indicator_column(fc.categorical_column_with_vocabulary_list("n", [3, 5])),
        fc.indicator_column(fc.categorical_column_with_hash_bucket("h", 7, "int64")),
    ):
        assert column_from_config(column_to_config(column)) == column


def test_an_embedding_comes_back():
    category = fc.categorical_column_with_identity("i", 4)
    column = fc.embedding_column(
        category, 3, "sqrtn", keras.initializers.RandomNormal(seed=3), max_norm=2.0, trainable=False
    )
    again = column_from_config(column_to_config(column))
    assert (again.categorical_column, again.dimension, again.combiner) == (category, 3, "sqrtn")
    assert (again.max_norm, again.trainable, again.shared_name) == (2.0, False, None)
    np.testing.assert_array_equal(
        np.asarray(again.initializer((4, 3))), np.asarray(column.initializer((4, 3)))
    )


def test_a_function_that_has_no_registered_name_is_refused():
    with pytest.raises(InputError, match="register_keras_serializable"):
        column_to_config(fc.numeric_column("x", normalizer_fn=lambda values: values))
    with pytest.raises(InputError, match="register_keras_serializable"):
        column_to_config(fc.numeric_column("x", normalizer_fn=np.nan_to_num))
    config = column_to_config(fc.numeric_column("x", normalizer_fn=minus_one))
    config["normalizer_fn"] = {"function": "test>unknown"}
    with pytest.raises(InputError, match="'test>unknown', which isn't"):
        column_from_config(config)
