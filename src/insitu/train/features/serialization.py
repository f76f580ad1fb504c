"""Feature columns in the file of a model."""

from __future__ import annotations

from typing import Any

import keras

from insitu.errors import InputError
from insitu.train.features.categorical import (
    BucketizedColumn,
    CategoricalColumn,
    CrossedColumn,
    HashedColumn,
    IdentityColumn,
    VocabularyColumn,
    WeightedColumn,
)
from insitu.train.features.dense_columns import EmbeddingColumn, IndicatorColumn
from insitu.train.features.numeric import NumericColumn
from insitu.train.features.sequence import SequenceCategoricalColumn, SequenceNumericColumn

_KIND = "column"


def column_to_config(column: Any) -> dict[str, Any]:
    """Return a column as JSON has it. Raises InputError for a normalizer_fn that can't be saved."""
    config = {name: _value_to_config(value, column) for name, value in column.get_config().items()}
    return {_KIND: column.kind, **config}


def _value_to_config(value: Any, column: Any) -> Any:
    if isinstance(value, NumericColumn | CategoricalColumn):
        return column_to_config(value)
    if isinstance(value, list):
        return [_value_to_config(part, column) for part in value]
    if isinstance(value, keras.initializers.Initializer):
        return keras.saving.serialize_keras_object(value)
    if not callable(value):
        return value
    if getattr(value, "__name__", "<lambda>") == "<lambda>" or keras.saving.get_registered_name(value) == (
        value.__name__
    ):
        raise InputError(
            f"A normalizer_fn is saved by its registered name. Received: {value!r} of column "
            f"{column.name!r}. "
            f"Write it as a function with @keras.saving.register_keras_serializable()"
        )
    return {"function": keras.saving.get_registered_name(value)}


def column_from_config(config: dict[str, Any]) -> Any:
    """Return the column that `column_to_config` has described. Raises InputError."""
    values = {name: _value_from_config(value) for name, value in config.items() if name != _KIND}
    return _MAKERS[config[_KIND]](**values)


def _value_from_config(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_from_config(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _KIND in value:
        return column_from_config(value)
    if "function" in value:
        found = keras.saving.get_registered_object(value["function"])
        if found is None:
            raise InputError(
                f"A function that a model was saved with is registered before the model is loaded. Received: "
                f"{value['function']!r}, which isn't. Import the module that registers it"
            )
        return found
    return keras.saving.deserialize_keras_object(value)


def _make_numeric(shape: list[int], default_value: list[float] | None, **values: Any) -> NumericColumn:
    default = None if default_value is None else tuple(default_value)
    return NumericColumn(shape=tuple(shape), default_value=default, **values)


def _make_identity(key: str, num_buckets: int, default_value: int | None) -> IdentityColumn:
    return IdentityColumn(key, num_buckets, default_value)


def _make_hashed(key: str, hash_bucket_size: int, dtype: str) -> HashedColumn:
    return HashedColumn(key, hash_bucket_size, dtype)


def _make_vocabulary(vocabulary: list[Any], num_oov_buckets: int, **values: Any) -> VocabularyColumn:
    return VocabularyColumn(vocabulary=tuple(vocabulary), oov_buckets=num_oov_buckets, **values)


def _make_bucketized(source_column: NumericColumn, boundaries: list[float]) -> BucketizedColumn:
    return BucketizedColumn(source_column, tuple(boundaries))


def _make_crossed(keys: list[Any], hash_bucket_size: int, hash_key: int | None) -> CrossedColumn:
    return CrossedColumn(tuple(keys), hash_bucket_size, hash_key)


def _make_weighted(categorical_column: CategoricalColumn, weight_feature_key: str) -> WeightedColumn:
    return WeightedColumn(categorical_column, weight_feature_key)


def _make_sequence(categorical_column: Any) -> SequenceCategoricalColumn:
    return SequenceCategoricalColumn(categorical_column)


def _make_sequence_numeric(source_column: NumericColumn, default_value: float) -> SequenceNumericColumn:
    return SequenceNumericColumn(source_column, default_value)


_MAKERS: dict[str, Any] = {
    NumericColumn.kind: _make_numeric,
    IdentityColumn.kind: _make_identity,
    HashedColumn.kind: _make_hashed,
    VocabularyColumn.kind: _make_vocabulary,
    BucketizedColumn.kind: _make_bucketized,
    CrossedColumn.kind: _make_crossed,
    WeightedColumn.kind: _make_weighted,
    SequenceCategoricalColumn.kind: _make_sequence,
    SequenceNumericColumn.kind: _make_sequence_numeric,
    IndicatorColumn.kind: IndicatorColumn,
    EmbeddingColumn.kind: EmbeddingColumn,
}
