"""Columns of tf.feature_column are taken as they are, and have the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu import estimator as est
from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.extensions.features.tf_columns import convert_column

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = {
    "age": np.array([18.0, 30.5, 65.0], np.float32),
    "pair": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32),
    "word": np.array(["yes", "no", "maybe"]),
    "number": np.array([0, 2, 1]),
    "other": np.array([3, 1, 1]),
    "weight": np.array([1.0, 0.5, 2.0], np.float32),
}


def make_columns(of: Any, vocabulary: str) -> list[Any]:
    """Return a dense column for each kind. `of` is tf.feature_column or insitu.feature_column."""
    age = of.numeric_column("age", normalizer_fn=lambda x: (x - 20.0) / 4.0)
    ages = of.bucketized_column(of.numeric_column("age"), [20.0, 40.0])
    word = of.categorical_column_with_vocabulary_list("word", ["no", "yes"], num_oov_buckets=2)
    read = of.categorical_column_with_vocabulary_file("word", vocabulary, num_oov_buckets=1)
    number = of.categorical_column_with_identity("number", 4, default_value=0)
    hashed = of.categorical_column_with_hash_bucket("word", 7)
    crossed = of.crossed_column(["word", ages], 11, hash_key=5)
    embedded = {"dimension": 3, "combiner": "sqrtn", "max_norm": 1.5, "trainable": False}
    ones, quarter = keras.initializers.Ones(), keras.initializers.Constant(0.25)
    return [
        [age, of.numeric_column("pair", (2,), dtype=tf.float64), ages],
        [of.indicator_column(word), of.indicator_column(of.weighted_categorical_column(number, "weight"))],
        [of.indicator_column(read)],
        [of.indicator_column(hashed), of.embedding_column(crossed, initializer=ones, **embedded)],
        of.shared_embeddings(
            [number, of.categorical_column_with_identity("other", 4)], 2, initializer=quarter
        ),
    ]


def test_values_are_those_of_the_same_columns_here(tmp_path: Path) -> None:
    """`test_random_columns.py` compares them with TensorFlow's."""
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("no\nyes\n")
    with tf.Graph().as_default():  # as shared_embeddings asks for
        given = make_columns(tf.feature_column, str(vocabulary))
    for theirs, own in zip(given, make_columns(fc, str(vocabulary)), strict=True):
        assert [convert_column(column).name for column in theirs] == [column.name for column in own]
        one, other = fc.DenseFeatures(theirs), fc.DenseFeatures(own)
        assert np.array_equal(one(ROWS), other(ROWS))
        assert [w.path.partition("/")[2] for w in one.weights] == [
            w.path.partition("/")[2] for w in other.weights
        ]
        assert [w.trainable for w in one.weights] == [w.trainable for w in other.weights]


def test_initializers_are_those_of_keras() -> None:
    word = tf.feature_column.categorical_column_with_identity("k", 4)
    column = convert_column(tf.feature_column.embedding_column(word, 16))
    assert isinstance(column.initializer, keras.initializers.TruncatedNormal)
    assert column.initializer.stddev == pytest.approx(0.25)
    for given, name in [
        (tf.compat.v1.random_uniform_initializer(-1, 1, seed=3), "RandomUniform"),
        (tf.random_normal_initializer(stddev=0.5), "RandomNormal"),
        (tf.compat.v1.variance_scaling_initializer(), "VarianceScaling"),
        (keras.initializers.GlorotUniform(1), "GlorotUniform"),
    ]:
        column = convert_column(tf.feature_column.embedding_column(word, 2, initializer=given))
        assert type(column.initializer).__name__ == name and column.initializer((4, 2)).shape == (4, 2)


def test_sequences_are_taken(tmp_path: Path) -> None:
    word = tf.feature_column.sequence_categorical_column_with_identity("k", 4)
    numbers = tf.feature_column.sequence_numeric_column("x", default_value=-1.0)
    given = {"k": [[1], [2, 3]], "x": [[0.5], [1.0, 2.0]]}
    layer = fc.SequenceFeatures([tf.feature_column.indicator_column(word), numbers])
    found, steps = layer(given)
    assert np.asarray(steps).tolist() == [1, 2] and np.asarray(found)[0, 1].tolist() == [0, 0, 0, 0, -1]


def test_what_has_no_counterpart_is_refused() -> None:
    word = tf.feature_column.categorical_column_with_identity("k", 4)
    given = tf.feature_column.embedding_column(word, 2, ckpt_to_load_from="m", tensor_name_in_ckpt="t")
    with pytest.raises(InputError, match="Received: ckpt_to_load_from='m' for column 'k_embedding'"):
        fc.DenseFeatures([given])
    assert convert_column("age") == "age"


def test_estimators_train_on_them(tmp_path: Path) -> None:
    def steps(of: Any, folder: str) -> Any:
        word = of.categorical_column_with_vocabulary_list("word", ["no", "yes"])
        made = est.DNNLinearCombinedRegressor(
            tmp_path / folder,
            linear_feature_columns=[word],
            dnn_feature_columns=[of.numeric_column("age"), of.indicator_column(word)],
            dnn_hidden_units=[4],
        )
        keras.utils.set_random_seed(3)
        made.train(lambda: (ROWS, ROWS["weight"]), max_steps=3)
        return made.evaluate(lambda: (ROWS, ROWS["weight"]))

    assert steps(tf.feature_column, "a") == steps(fc, "b")
