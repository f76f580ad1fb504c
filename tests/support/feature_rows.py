"""Columns of each kind, made by insitu's or TensorFlow's functions, and rows for them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

ROWS = 64
WORDS = [
    "",
    "a",
    "bc",
    "def",
    "ghij",
    "twelve bytes",
    "é" * 7,
    "x" * 16,
    "y" * 17,
    "z" * 32,
    "w" * 33,
    "v" * 64,
]
WORDS += ["u" * 65, "The quick brown fox jumps over the lazy dog, then rests. " * 4]


def make_rows() -> dict[str, Any]:
    """Return features of each form: numbers, text, whole numbers with some missing, and rows of different
    lengths as lists."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 4, ROWS)
    return {
        "age": rng.uniform(0, 90, ROWS).astype(np.float32),
        "position": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "word": np.array(rng.choice(WORDS, ROWS), object),
        "words": np.array(rng.choice(WORDS[1:], (ROWS, 3)), object),
        "more_words": np.array(rng.choice(WORDS[1:], (ROWS, 3)), object),
        "number": rng.integers(-1, 6, ROWS),
        "more_numbers": rng.integers(-1, 7, ROWS),
        "other_numbers": rng.integers(-1, 7, (ROWS, 2)),
        "numbers": rng.integers(-1, 5, (ROWS, 2)),
        "weights": rng.uniform(0.1, 2, (ROWS, 3)).astype(np.float32),
        "list": [rng.choice(WORDS[1:], n).tolist() for n in lengths],
        "more_list": [rng.choice(WORDS[1:], n).tolist() for n in lengths],
        "list_weights": [rng.uniform(-1, 2, n).astype(np.float32).tolist() for n in lengths],
    }


@keras.saving.register_keras_serializable(package="test")
def halve(values: Any) -> Any:
    return (values - 3.0) / 2.0


def make_columns(fc: Any, vocabulary_file: str) -> list[Any]:
    """Return dense columns over all kinds. `fc` is a module of functions, insitu's or TensorFlow's."""
    age, position = fc.numeric_column("age"), fc.numeric_column("position", shape=(2,), normalizer_fn=halve)
    buckets = fc.bucketized_column(age, [18, 25, 40.5, 65])
    identity = fc.categorical_column_with_identity("number", 6)
    clipped = fc.categorical_column_with_identity("numbers", 3, default_value=2)
    listed = fc.categorical_column_with_vocabulary_list("word", WORDS[1:5])
    unknown = fc.categorical_column_with_vocabulary_list("words", ["bc", "def"], num_oov_buckets=3)
    filed = fc.categorical_column_with_vocabulary_file(
        "list", vocabulary_file, vocabulary_size=3, num_oov_buckets=2
    )
    hashed = fc.categorical_column_with_hash_bucket("more_words", 1000)
    tags = fc.categorical_column_with_hash_bucket("more_list", 13)
    columns = [
        age,
        position,
        buckets,
        fc.bucketized_column(position, [-1.0, 0.0, 1.0]),
        fc.indicator_column(identity),
        fc.indicator_column(listed),
        fc.embedding_column(clipped, 3, combiner="sum"),
        fc.embedding_column(unknown, 2),
        fc.indicator_column(fc.weighted_categorical_column(unknown, "weights")),
        fc.embedding_column(hashed, 3, combiner="sqrtn", max_norm=1.0),
        fc.embedding_column(fc.weighted_categorical_column(hashed, "weights"), 2, combiner="sqrtn"),
        fc.indicator_column(filed),
        fc.embedding_column(fc.weighted_categorical_column(tags, "list_weights"), 4),
        fc.embedding_column(fc.weighted_categorical_column(filed, "list_weights"), 4, combiner="sum"),
        fc.indicator_column(fc.crossed_column(["word", "number"], 50)),
        fc.indicator_column(fc.crossed_column([buckets, "words"], 90)),
        fc.embedding_column(fc.crossed_column(["word", listed, identity], 200, hash_key=42), 3),
        fc.indicator_column(fc.crossed_column(["list", fc.crossed_column([identity, "words"], 9)], 70)),
    ]
    shared = [fc.categorical_column_with_identity(key, 7) for key in ("more_numbers", "other_numbers")]
    return [*columns, *fc.shared_embedding_columns(shared, 3)]


def table_of(shape: Any) -> np.ndarray:
    """Return the values of an embedding of this shape, the same each time."""
    rows, width = (int(length) for length in shape)
    return np.random.default_rng(1000 * rows + width).normal(size=(rows, width)).astype(np.float32)


def make_tables() -> Any:
    """Return what holds the table of one column of TensorFlow's, with the values of `table_of`."""
    import tensorflow as tf
    from tensorflow.python.feature_column import feature_column_v2 as v2

    class Tables(v2.StateManager):
        def create_variable(self, column: Any, name: str, shape: Any, **options: Any) -> None:
            self.table = tf.constant(table_of(shape))

        def has_resource(self, column: Any, name: str) -> bool:
            return False

        def add_resource(self, column: Any, name: str, resource: Any) -> None:
            pass

        def get_variable(self, column: Any, name: str) -> Any:
            return self.table

    return Tables()
