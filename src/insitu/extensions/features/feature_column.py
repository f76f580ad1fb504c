"""`insitu.feature_column`: columns that say how features of the data become inputs of a model.

Their values equal those of TensorFlow's columns, on each backend. What needs text, a vocabulary or a hash is
done by NumPy before the graph (`FeatureTransform`), the rest by a layer (`DenseFeatures`).

Example:
    >>> age = insitu.feature_column.numeric_column("age")
    >>> ranges = insitu.feature_column.bucketized_column(age, [18, 30, 65])
    >>> ranges.name
    'age_bucketized'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

from insitu.base.errors import InputError
from insitu.base.missing_names import missing_name
from insitu.base.tf_signatures import takes_old
from insitu.extensions.features.categorical import (
    BucketizedColumn,
    CategoricalColumn,
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
from insitu.extensions.features.dense_columns import COMBINERS, EmbeddingColumn, IndicatorColumn
from insitu.extensions.features.dense_features import (
    DenseFeatures,
    SequenceFeatures,
    input_layer,
    make_inputs,
)
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.sequence import SequenceCategoricalColumn, SequenceNumericColumn
from insitu.extensions.features.transform import FeatureTransform

__all__ = [
    "DenseFeatures",
    "FeatureTransform",
    "SequenceFeatures",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "input_layer",
    "make_inputs",
    "numeric_column",
    "raw_keys",
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
    "shared_embedding_columns",
    "shared_embeddings",
    "weighted_categorical_column",
]


def __getattr__(name: str) -> Any:
    raise missing_name("insitu.feature_column", name)


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: Any = None,
    dtype: Any = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Return a column of the numbers of feature `key`, `shape` for each row.

    `default_value` fills batches that lack the feature. `normalizer_fn` gets an array [rows, *shape] of
    `dtype`, or of the feature's own where that is wider, and returns one of that shape. Raises InputError.
    """
    row = check_shape(shape)
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise InputError(f"normalizer_fn is a function of an array. Received: {normalizer_fn!r}")
    default = check_default(default_value, row)
    return NumericColumn(check_key(key), row, default, check_number_dtype(dtype), normalizer_fn)


def bucketized_column(source_column: NumericColumn, boundaries: Sequence[float]) -> BucketizedColumn:
    """Return a column of the ranges of numbers: below the first boundary, from each one on. Raises
    InputError."""
    if not isinstance(source_column, NumericColumn):
        raise InputError(
            f"bucketized_column takes a numeric_column. Received: {source_column!r}. Wrap the feature in "
            f"numeric_column(key) first"
        )
    if len(source_column.shape) > 1:
        raise InputError(
            f"bucketized_column takes a numeric_column of one axis. Received: shape={source_column.shape}. "
            f"Pass "
            f"shape=({source_column.width},) to numeric_column"
        )
    return BucketizedColumn(source_column, check_boundaries(boundaries))


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityColumn:
    """Return a column whose ids are the whole numbers of a feature, in [0, num_buckets).

    Others are an error, or get the id `default_value`. -1 stands for a missing value. Raises InputError.
    """
    buckets = check_count(num_buckets, "num_buckets")
    return IdentityColumn(check_key(key), buckets, check_id(default_value, buckets))


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = "string"
) -> HashedColumn:
    """Return a column whose ids are hashes of the values, by FarmHash's Fingerprint64. Raises InputError."""
    size = check_count(hash_bucket_size, "hash_bucket_size")
    return HashedColumn(check_key(key), size, check_dtype(dtype, "categorical_column_with_hash_bucket"))


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Any],
    dtype: Any = None,
    default_value: int | None = -1,
    num_oov_buckets: int = 0,
) -> VocabularyColumn:
    """Return a column whose ids are places in a list of texts or whole numbers.

    Other values have no id, or `default_value`, or one of `num_oov_buckets` further ones, by their hash.
    Raises InputError.
    """
    vocabulary, kind = check_vocabulary(vocabulary_list, dtype, check_key(key))
    default, buckets = check_unknown(default_value, num_oov_buckets, len(vocabulary))
    return VocabularyColumn(key, vocabulary, kind, default, buckets)


@takes_old(file_format="Leave it out: a vocabulary is a text file")
def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | Path,
    vocabulary_size: int | None = None,
    *,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = "string",
) -> VocabularyColumn:
    """Return a column whose ids are places in a file of one value a line.

    The file is read at once; a saved model has its values. `vocabulary_size` takes the first lines only.
    Raises InputError.
    """
    unknown = (default_value, num_oov_buckets)
    return read_vocabulary_column(check_key(key), vocabulary_file, vocabulary_size, dtype, *unknown)


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = "float32"
) -> WeightedColumn:
    """Return a categorical column whose values have the weights of another feature. Raises InputError."""
    _check_categorical(categorical_column, "weighted_categorical_column")
    if isinstance(categorical_column, WeightedColumn | SequenceCategoricalColumn):
        raise InputError(
            f"A column is weighted once, and a sequence isn't weighted. Received: "
            f"{categorical_column.name!r}. "
            f"Multiply the weights in the data, or those of the steps in the model"
        )
    check_number_dtype(dtype)
    return WeightedColumn(categorical_column, check_key(weight_feature_key, "weight_feature_key"))


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Return a column whose ids are hashes of all combinations of the values of `keys`.

    A key is the name of a feature, of text or whole numbers, or a categorical column. Raises InputError.
    """
    listed = tuple(keys) if isinstance(keys, Iterable) and not isinstance(keys, str) else ()
    if len(listed) < 2:
        raise InputError(
            f"crossed_column takes two keys at least. Received: {keys!r}. Add one, such as another column"
        )
    for key in listed:
        if isinstance(key, str):
            check_key(key)
        elif isinstance(key, HashedColumn):
            raise InputError(
                f"crossed_column hashes its keys itself, so that a hash of hashes would collide more. "
                f"Received: "
                f"the hashed column {key.name!r}. Pass the key {key.key!r}"
            )
        elif isinstance(key, WeightedColumn | SequenceCategoricalColumn):
            kind = "weights" if isinstance(key, WeightedColumn) else "sequences"
            raise InputError(
                f"crossed_column takes no {kind}. Received: {key.name!r}. Pass the column that it wraps"
            )
        elif not isinstance(key, CategoricalColumn):
            raise InputError(
                f"A key of crossed_column is the name of a feature or a categorical column. Received: "
                f"{key!r}. "
                f"Make ranges of numbers by bucketized_column"
            )
    if hash_key is not None and (isinstance(hash_key, bool) or not isinstance(hash_key, int) or hash_key < 0):
        raise InputError(f"hash_key is a whole number, 0 at least. Received: {hash_key!r}")
    return CrossedColumn(listed, check_count(hash_bucket_size, "hash_bucket_size"), hash_key)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Return a dense column with one number for each id: how often a row has it. Raises InputError."""
    _check_categorical(categorical_column, "indicator_column")
    return IndicatorColumn(categorical_column)


_FROM_CHECKPOINT = {
    "ckpt_to_load_from": "Pass warm_start_from to the estimator, or set the weights of the layer",
    "use_safe_embedding_lookup": "Leave it out: a row without ids gets zeros",
    "tensor_name_in_ckpt": "Pass warm_start_from to the estimator, or set the weights of the layer",
}


@takes_old(**_FROM_CHECKPOINT)
def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """Return a dense column of `dimension` numbers from a trained table.

    A row of several ids gets the `combiner` of theirs: "mean", "sqrtn" or "sum", by weights where there are
    some; a row of none gets zeros. The default initializer is a truncated normal of deviation
    1 / sqrt(dimension). Raises InputError.
    """
    _check_categorical(categorical_column, "embedding_column")
    return _make_embedding(categorical_column, dimension, combiner, initializer, max_norm, trainable, None)


@takes_old(**_FROM_CHECKPOINT)
def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    shared_embedding_collection_name: str | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[EmbeddingColumn]:
    """Return an embedding column for each categorical one. In a layer they share one table.

    All have the same number of ids. Raises InputError.
    """
    listed = list(categorical_columns) if isinstance(categorical_columns, Iterable) else []
    for column in listed:
        _check_categorical(column, "shared_embeddings")
    sizes = {column.name: column.num_buckets for column in listed}
    if len(listed) < 2 or len(set(sizes.values())) > 1:
        raise InputError(
            f"shared_embeddings takes two categorical columns at least, with the same number of ids. "
            f"Received: "
            f"{sizes}. Give all of them the same vocabulary or number of buckets"
        )
    name = shared_embedding_collection_name or "_".join(sorted(sizes)) + "_shared_embedding"
    first = _make_embedding(listed[0], dimension, combiner, initializer, max_norm, trainable, name)
    rest = [
        _make_embedding(column, dimension, combiner, first.initializer, max_norm, trainable, name)
        for column in listed[1:]
    ]
    return [first, *rest]


shared_embedding_columns = shared_embeddings
"""The name that it had in TensorFlow 1."""


def _make_embedding(
    categorical: CategoricalColumn,
    dimension: int,
    combiner: str,
    initializer: Any,
    max_norm: float | None,
    trainable: bool,
    shared_name: str | None,
) -> EmbeddingColumn:
    size = check_count(dimension, "dimension")
    if combiner not in COMBINERS:
        raise InputError(f"combiner is one of {', '.join(COMBINERS)}. Received: {combiner!r}")
    if max_norm is not None and not max_norm > 0:
        raise InputError(f"max_norm is a number above 0. Received: {max_norm!r}. Leave it out for no limit")
    made = (
        keras.initializers.TruncatedNormal(0.0, 1 / math.sqrt(size))
        if initializer is None
        else keras.initializers.get(initializer)
    )
    limit = None if max_norm is None else float(max_norm)
    return EmbeddingColumn(categorical, size, combiner, made, limit, bool(trainable), shared_name)


def sequence_numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: float = 0.0,
    dtype: Any = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> SequenceNumericColumn:
    """Return a column of the numbers of each step of feature `key`, `shape` for each step.

    `default_value` fills the steps that shorter rows lack. Raises InputError.
    """
    source = numeric_column(key, shape, None, dtype, normalizer_fn)
    if isinstance(default_value, bool) or not isinstance(default_value, int | float):
        raise InputError(
            f"default_value of a sequence_numeric_column is a number. Received: {default_value!r}"
        )
    return SequenceNumericColumn(source, float(default_value))


def sequence_categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> SequenceCategoricalColumn:
    """Return `categorical_column_with_identity` of each step. Raises InputError."""
    return SequenceCategoricalColumn(categorical_column_with_identity(key, num_buckets, default_value))


def sequence_categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = "string"
) -> SequenceCategoricalColumn:
    """Return `categorical_column_with_hash_bucket` of each step. Raises InputError."""
    return SequenceCategoricalColumn(categorical_column_with_hash_bucket(key, hash_bucket_size, dtype))


def sequence_categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[Any],
    dtype: Any = None,
    default_value: int | None = -1,
    num_oov_buckets: int = 0,
) -> SequenceCategoricalColumn:
    """Return `categorical_column_with_vocabulary_list` of each step. Raises InputError."""
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_list(key, vocabulary_list, dtype, default_value, num_oov_buckets)
    )


def sequence_categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | Path,
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = "string",
) -> SequenceCategoricalColumn:
    """Return `categorical_column_with_vocabulary_file` of each step. Raises InputError."""
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_file(
            key,
            vocabulary_file,
            vocabulary_size,
            num_oov_buckets=num_oov_buckets,
            default_value=default_value,
            dtype=dtype,
        )
    )


def _check_categorical(column: Any, what: str) -> None:
    if not isinstance(column, CategoricalColumn):
        advice = (
            "make ranges of it by bucketized_column"
            if isinstance(column, NumericColumn)
            else "make one of it"
        )
        raise InputError(
            f"{what} takes a categorical column. Received: {column!r}. Pass such as "
            f"categorical_column_with_identity(key, num_buckets), or {advice}"
        )


def raw_keys(columns: Iterable[Any]) -> list[str]:
    """Return the features of the data that columns read, in alphabetical order."""
    return list(FeatureTransform(columns).raw_keys)
