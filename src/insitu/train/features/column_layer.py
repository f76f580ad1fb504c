"""What the layers of feature columns have in common: their tables, and what is looked up before the graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
from keras import ops

from insitu.train.features.categorical import WeightedColumn
from insitu.train.features.dense_columns import EmbeddingColumn, leaf_of
from insitu.train.features.serialization import column_from_config, column_to_config
from insitu.train.features.transform import IDS, WEIGHTS, FeatureTransform


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
        """Return (ids [rows, ids of a row], 0 where there is none; their weights, 0 where there is none)."""
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
    """Return what looks up the features of all layers over columns in a model; None where it has none."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, ColumnLayer)]
    columns = [column for layer in layers for column in layer.feature_columns]
    lengths = {name: length for layer in layers for name, length in layer.transform.lengths.items()}
    return FeatureTransform(columns, lengths) if columns else None


def _fresh(initializer: Any) -> Any:
    """Return an initializer that draws numbers of its own, without a seed: another layer may have the
    column."""
    return initializer.clone() if hasattr(initializer, "clone") else initializer
