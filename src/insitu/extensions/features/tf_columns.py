"""Columns of `tf.feature_column`, made columns of insitu's. TensorFlow isn't imported for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from insitu.base.errors import InputError
from insitu.extensions.features.categorical import (
    BucketizedColumn,
    CrossedColumn,
    HashedColumn,
    IdentityColumn,
    VocabularyColumn,
    WeightedColumn,
    read_vocabulary_column,
)
from insitu.extensions.features.checks import (
    check_boundaries,
    check_count,
    check_default,
    check_dtype,
    check_id,
    check_key,
    check_number_dtype,
    check_shape,
    check_unknown,
    check_vocabulary,
)
from insitu.extensions.features.dense_columns import EmbeddingColumn, IndicatorColumn
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.sequence import SequenceCategoricalColumn, SequenceNumericColumn

_MODULES = "tensorflow.python.feature_column."


def convert_column(column: Any) -> Any:
    """Return the column of insitu's that reads and makes what one of TensorFlow's does; else what was given.
    Raises InputError for one that has no counterpart."""
    kind = type(column)
    if not kind.__module__.startswith(_MODULES):
        return column
    convert = _CONVERSIONS.get(kind.__name__)
    if convert is None:
        raise InputError(
            f"Columns of tf.feature_column are taken, of the kinds {', '.join(sorted(_CONVERSIONS))}. "
            f"Received: {kind.__name__}. Make it by insitu.feature_column"
        )
    return convert(column)


def _numeric(column: Any) -> NumericColumn:
    shape = check_shape(column.shape)
    default = check_default(column.default_value, shape)
    dtype = check_number_dtype(column.dtype)
    return NumericColumn(check_key(column.key), shape, default, dtype, column.normalizer_fn)


def _sequence_numeric(column: Any) -> SequenceNumericColumn:
    shape, dtype = check_shape(column.shape), check_number_dtype(column.dtype)
    source = NumericColumn(check_key(column.key), shape, None, dtype, column.normalizer_fn)
    return SequenceNumericColumn(source, float(column.default_value))


def _bucketized(column: Any) -> BucketizedColumn:
    return BucketizedColumn(convert_column(column.source_column), check_boundaries(column.boundaries))


def _identity(column: Any) -> IdentityColumn:
    buckets = check_count(column.number_buckets, "num_buckets")
    return IdentityColumn(check_key(column.key), buckets, check_id(column.default_value, buckets))


def _hashed(column: Any) -> HashedColumn:
    size = check_count(column.hash_bucket_size, "hash_bucket_size")
    return HashedColumn(check_key(column.key), size, check_dtype(column.dtype, "a hashed column"))


def _vocabulary(column: Any) -> VocabularyColumn:
    vocabulary, kind = check_vocabulary(column.vocabulary_list, column.dtype, check_key(column.key))
    unknown = check_unknown(column.default_value, column.num_oov_buckets, len(vocabulary))
    return VocabularyColumn(column.key, vocabulary, kind, *unknown)


def _vocabulary_file(column: Any) -> VocabularyColumn:
    if column.file_format not in (None, "text"):
        raise InputError(
            f"A vocabulary is a text file. Received: file_format={column.file_format!r} for column "
            f"{column.key!r}. Write its values into a text file, one a line"
        )
    file = (check_key(column.key), column.vocabulary_file, column.vocabulary_size, column.dtype)
    return read_vocabulary_column(*file, column.default_value, column.num_oov_buckets)


def _weighted(column: Any) -> WeightedColumn:
    return WeightedColumn(convert_column(column.categorical_column), check_key(column.weight_feature_key))


def _crossed(column: Any) -> CrossedColumn:
    keys = tuple(key if isinstance(key, str) else convert_column(key) for key in column.keys)
    return CrossedColumn(keys, check_count(column.hash_bucket_size, "hash_bucket_size"), column.hash_key)


def _indicator(column: Any) -> IndicatorColumn:
    return IndicatorColumn(convert_column(column.categorical_column))


def _sequence(column: Any) -> SequenceCategoricalColumn:
    return SequenceCategoricalColumn(convert_column(column.categorical_column))


def _embedding(column: Any) -> EmbeddingColumn:
    _refuse_checkpoint(column, column.ckpt_to_load_from)
    return _make_embedding(column, column.dimension, column.initializer, column.trainable, None)


def _shared(column: Any) -> EmbeddingColumn:
    table = column.shared_embedding_column_creator
    _refuse_checkpoint(column, table._ckpt_to_load_from)
    return _make_embedding(column, table.dimension, table._initializer, table._trainable, table._name)


def _make_embedding(
    column: Any, dimension: int, initializer: Any, trainable: bool, shared_name: str | None
) -> EmbeddingColumn:
    limit = None if column.max_norm is None else float(column.max_norm)
    return EmbeddingColumn(
        convert_column(column.categorical_column),
        check_count(dimension, "dimension"),
        column.combiner,
        _convert_initializer(initializer),
        limit,
        bool(trainable),
        shared_name,
    )


def _refuse_checkpoint(column: Any, path: Any) -> None:
    if path is not None:
        raise InputError(
            f"An embedding begins with its initializer. Received: ckpt_to_load_from={path!r} for column "
            f"{column.name!r}. Pass warm_start_from to the estimator, or set the weights of the layer"
        )


def _convert_initializer(initializer: Any) -> Any:
    """Return the Keras initializer of the same values. Raises InputError."""
    if isinstance(initializer, keras.Initializer):
        return initializer
    made = getattr(keras.initializers, type(initializer).__name__, None)
    if made is None or not hasattr(initializer, "get_config"):
        raise InputError(
            f"The initializer of an embedding is one of Keras or of TensorFlow. Received: {initializer!r}. "
            "Pass such as keras.initializers.RandomNormal()"
        )
    config = initializer.get_config()
    return made(**{name: value for name, value in config.items() if name not in ("dtype", "verify_shape")})


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "BucketizedColumn": _bucketized,
    "CrossedColumn": _crossed,
    "EmbeddingColumn": _embedding,
    "HashedCategoricalColumn": _hashed,
    "IdentityCategoricalColumn": _identity,
    "IndicatorColumn": _indicator,
    "NumericColumn": _numeric,
    "SequenceCategoricalColumn": _sequence,
    "SequenceNumericColumn": _sequence_numeric,
    "SharedEmbeddingColumn": _shared,
    "VocabularyFileCategoricalColumn": _vocabulary_file,
    "VocabularyListCategoricalColumn": _vocabulary,
    "WeightedCategoricalColumn": _weighted,
}
"""By the name of TensorFlow's class."""
