"""Random columns of each kind have the values of TensorFlow's on random rows."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feature_rows import make_tables, table_of
from random_columns import Described, Features, Maker, build, find_texts, is_sequence

from insitu import feature_column as fc

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",
    "ignore:overflow encountered in cast:RuntimeWarning",
    "ignore:invalid value encountered in cast:RuntimeWarning",
)


def as_tensor(values: Any, is_text: bool) -> Any:
    import tensorflow as tf

    if values.dtype == object and values.ndim == 1 and isinstance(values[0], np.ndarray):
        flat = np.concatenate(list(values))
        is_text = is_text or (flat.dtype == object and bool(flat.size))
        given = tf.constant(flat.tolist(), tf.string) if is_text else tf.constant(flat)
        return tf.RaggedTensor.from_row_lengths(given, [len(row) for row in values]).to_sparse()
    return tf.constant(values.tolist() if values.dtype == object else values)


def values_of_tensorflow(features: Features, described: Described) -> tuple[np.ndarray, Any]:
    """Return (numbers, steps of each row or None)."""
    import tensorflow as tf
    from tensorflow.python.feature_column import feature_column_v2 as v2

    texts = find_texts(described)
    cache = v2.FeatureTransformationCache({k: as_tensor(v, k in texts) for k, v in features.items()})
    column, tables = build(tf.feature_column, described, tf.as_dtype), make_tables()
    if hasattr(column, "create_state"):
        column.create_state(tables)
    if is_sequence(described):
        found = column.get_sequence_dense_tensor(cache, tables)
        numbers, steps = found.dense_tensor.numpy(), found.sequence_length.numpy()
        return numbers.reshape(*numbers.shape[:2], int(np.prod(numbers.shape[2:]))), steps
    numbers = column.get_dense_tensor(cache, tables).numpy()
    return numbers.reshape(len(numbers), int(np.prod(numbers.shape[1:]))), None


def values_here(features: Features, column: Any, described: Described) -> tuple[np.ndarray, Any]:
    layer = (fc.SequenceFeatures if is_sequence(described) else fc.DenseFeatures)([column])
    layer.build()
    for weight in layer.weights:
        weight.assign(table_of(weight.shape))
    found = layer(features)
    numbers, steps = found if is_sequence(described) else (found, None)
    return np.asarray(numbers), None if steps is None else np.asarray(steps)


@pytest.mark.long
def test_random_columns_have_the_values_of_tensorflow(tmp_path: Path):
    import tensorflow as tf

    kinds: collections.Counter[str] = collections.Counter()
    for seed in range(400):
        maker = Maker(seed, tmp_path)
        described = maker.make()
        kinds[described[0]] += 1
        expected, expected_steps = values_of_tensorflow(maker.features, described)
        own = build(fc, described, lambda dtype: dtype)
        numbers, steps = values_here(maker.features, own, described)
        theirs = build(tf.feature_column, described, tf.as_dtype)
        taken = values_here(maker.features, theirs, described)
        told = f"seed {seed}: {described} of {maker.features}"
        np.testing.assert_array_equal(taken[0], numbers, err_msg=told)
        if expected.shape[1]:  # a batch of no step has one here, which no row has
            np.testing.assert_allclose(numbers, expected, rtol=1e-4, atol=1e-5, err_msg=told)
        if steps is not None:
            assert steps.tolist() == expected_steps.tolist(), told
    assert len(kinds) == 5 and min(kinds.values()) > 9, kinds
