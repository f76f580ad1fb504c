"""What the layers of feature columns have in common: their tables, and what is looked up before the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
from keras import ops

from insitu.base.errors import InputError
from insitu.extensions.features.categorical import (
    BucketizedColumn,
    CategoricalColumn,
    CrossedColumn,
    HashedColumn,
    IdentityColumn,
    VocabularyColumn,
    WeightedColumn,
)
from insitu.extensions.features.dense_columns import EmbeddingColumn, IndicatorColumn, leaf_of
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.sequence import SequenceCategoricalColumn, SequenceNumericColumn
from insitu.extensions.features.transform import IDS, WEIGHTS, FeatureTransform


class ColumnLayer(keras.layers.Layer):
    """A layer over feature columns, which it has checked."""

    def __init__(
        self, feature_columns: tuple[Any, ...], lengths: Mapping[str, int] | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.feature_columns = feature_columns
        self.transform = FeatureTransform(feature_columns, lengths)
        self._tables: dict[str, Any] = {}

    @property
    def width(self) -> int:
        """Numbers of each row, or step, of the output."""
        return sum(column.width for column in self.feature_columns)

    def build(self, input_shape: Any = None) -> None:
        for column in self.feature_columns:
            if isinstance(column, EmbeddingColumn) and column.table_name not in self._tables:
                self._tables[column.table_name] = self.add_weight(
                    name=column.table_name,
                    shape=(column.categorical_column.num_buckets, column.dimension),
                    initializer=_fresh(column.initializer),
                    trainable=column.trainable,
                )
        self.built = True

    def __call__(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        """Transform the features where they aren't yet, then call the layer. Raises InputError."""
        names = self.transform.names
        if isinstance(features, Mapping) and all(name in features for name in names):
            features = {name: features[name] for name in names}
        else:
            features = self.transform(features)
        return super().__call__(features, *args, **kwargs)

    def ids_and_weights(self, column: Any, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return (ids [rows, ids of a row], 0 if there is none; their weights, 0 if there is none)."""
        leaf = leaf_of(column)
        ids = ops.cast(features[leaf.name + IDS], "int32")
        weights = features[leaf.name + WEIGHTS] if isinstance(leaf, WeightedColumn) else ops.ones_like(ids)
        weights = ops.where(ids < 0, ops.zeros_like(weights), weights)
        return ops.maximum(ids, 0), ops.cast(weights, self.compute_dtype)

    def rows_of_table(self, column: EmbeddingColumn, ids: Any) -> Any:
        """Return the rows of ids, of the norm that the column allows: [..., dimension]."""
        table = ops.cast(self._tables[column.table_name], self.compute_dtype)
        rows = ops.take(table, ids, axis=0)
        if column.max_norm is None:
            return rows
        squares = ops.sum(ops.square(rows), axis=-1, keepdims=True)
        # The root of 0 has no gradient.
        norms = ops.sqrt(ops.maximum(squares, column.max_norm**2))
        return rows * (column.max_norm / norms)

    def variables_of(self, column: Any) -> list[Any]:
        """Return the variables that a column has."""
        return [self._tables[column.table_name]] if isinstance(column, EmbeddingColumn) else []

    def get_config(self) -> dict[str, Any]:
        columns = [column_to_config(column) for column in self.feature_columns]
        return {**super().get_config(), "feature_columns": columns, "lengths": self.transform.lengths}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        columns: Iterable[Any] = [column_from_config(column) for column in config["feature_columns"]]
        return cls(**{**config, "feature_columns": columns})


def find_transform(model: Any) -> FeatureTransform | None:
    """Return what looks up the features of all layers over columns in a model; None if it has none."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, ColumnLayer)]
    columns = [column for layer in layers for column in layer.feature_columns]
    lengths = {name: length for layer in layers for name, length in layer.transform.lengths.items()}
    return FeatureTransform(columns, lengths) if columns else None


def _fresh(initializer: Any) -> Any:
    """Return an initializer that draws numbers of its own, without a seed: another layer may have the
    column."""
    return initializer.clone() if hasattr(initializer, "clone") else initializer


# Feature columns in the file of a model


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
