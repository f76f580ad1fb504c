"""Values equal those of TensorFlow's own sequence columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from feature_rows import make_tables, table_of

from insitu import feature_column as fc
from insitu.base.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = {
    "w": [["a", "b"], ["a", "none", "c"], ["b"]],
    "i": [[1, 2], [0, 1, 2], [1]],
    "n": [[1.0, 2.0, 3.0, 4.0], [1.0] * 6, [7.0, 8.0]],
}


def make_columns(columns: Any, numeric: Any = None) -> list[Any]:
    word = columns.sequence_categorical_column_with_vocabulary_list("w", ["a", "b", "c"])
    number = columns.sequence_categorical_column_with_identity("i", 3)
    hashed = columns.sequence_categorical_column_with_hash_bucket("w", 7)
    wrap = numeric or columns
    return [
        wrap.embedding_column(word, 3),
        wrap.indicator_column(number),
        columns.sequence_numeric_column("n", shape=(2,), default_value=-1.0),
        *([wrap.indicator_column(hashed)] if numeric else []),
    ]


def values_of_tensorflow(columns: list[Any]) -> tuple[list[np.ndarray], np.ndarray]:
    import tensorflow as tf
    from tensorflow.python.feature_column import feature_column_v2 as v2

    cache = v2.FeatureTransformationCache({k: tf.ragged.constant(v).to_sparse() for k, v in ROWS.items()})
    parts, lengths = [], None
    for column in columns:
        tables = make_tables()
        column.create_state(tables)
        found = column.get_sequence_dense_tensor(cache, tables)
        parts.append(found.dense_tensor.numpy())
        lengths = found.sequence_length.numpy()
    assert lengths is not None
    return parts, lengths


def test_values_equal_those_of_tensorflow():
    import tensorflow as tf

    theirs = make_columns(tf.feature_column, tf.feature_column)[:3]
    expected, expected_lengths = values_of_tensorflow(theirs)
    layer = fc.SequenceFeatures(make_columns(fc))
    layer.build()
    layer.weights[0].assign(table_of(layer.weights[0].shape))
    values, lengths = layer(ROWS)
    assert np.asarray(lengths).tolist() == expected_lengths.tolist() == [2, 3, 1]
    order = sorted(range(3), key=lambda at: theirs[at].name)
    np.testing.assert_allclose(
        np.asarray(values), np.concatenate([expected[at] for at in order], axis=-1), rtol=1e-6
    )


def test_all_columns_have_the_same_steps_in_a_row():
    layer = fc.SequenceFeatures(make_columns(fc))
    rows = {**ROWS, "n": [[1.0, 2.0], [1.0] * 6, [7.0, 8.0]]}
    told = "2 of 'i' and 1 of 'n' in row 0 of the batch"
    with pytest.raises(InputError, match=told):
        layer(rows)
    with pytest.raises(InputError, match=told):
        layer.transform(rows, np.zeros(3))


def test_a_model_over_sequences_is_saved(tmp_path: Path):
    inputs = fc.make_inputs(make_columns(fc))
    values, lengths = fc.SequenceFeatures(make_columns(fc))(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.LSTM(4)(values))
    model = keras.Model(inputs, [outputs, lengths])
    model.save(tmp_path / "m.keras")
    batch = fc.FeatureTransform(make_columns(fc))(ROWS)
    again = keras.saving.load_model(tmp_path / "m.keras").predict(batch, verbose=0)
    np.testing.assert_array_equal(again[0], model.predict(batch, verbose=0)[0])


def test_each_layer_takes_its_columns():
    plain = fc.numeric_column("x")
    sequence = fc.sequence_categorical_column_with_identity("k", 3)
    with pytest.raises(InputError, match=r"'x', which isn't one. Pass it to DenseFeatures"):
        fc.SequenceFeatures([plain])
    with pytest.raises(InputError, match=r"'k_indicator', which is a sequence. Pass it to SequenceFeatures"):
        fc.DenseFeatures([fc.indicator_column(sequence)])
    with pytest.raises(InputError, match=r"'k', which is categorical. Wrap it"):
        fc.SequenceFeatures([sequence])
    with pytest.raises(InputError, match="crossed_column takes no sequences"):
        fc.crossed_column(["a", sequence], 3)
    with pytest.raises(InputError, match="a sequence isn't weighted"):
        fc.weighted_categorical_column(sequence, "w")
