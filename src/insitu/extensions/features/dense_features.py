"""Layers of columns: `DenseFeatures` makes one matrix of all columns of a model, as `input_layer` does, and
`SequenceFeatures` a sequence of rows of numbers for each row of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
from keras import ops

from insitu.base.errors import InputError
from insitu.extensions.features.categorical import WeightedColumn
from insitu.extensions.features.column_layer import ColumnLayer
from insitu.extensions.features.dense_columns import EmbeddingColumn, leaf_of
from insitu.extensions.features.numeric import NumericColumn
from insitu.extensions.features.raw_values import Features
from insitu.extensions.features.sequence import SequenceCategoricalColumn, SequenceNumericColumn
from insitu.extensions.features.transform import (
    IDS,
    LENGTHS,
    VALUES,
    WEIGHTS,
    FeatureTransform,
    check_dense,
    check_sequence,
)


@keras.saving.register_keras_serializable(package="insitu")
class DenseFeatures(ColumnLayer):
    """Makes a matrix [rows, width] of the columns, in the order of their names, as TensorFlow's layer does.

    Input: what a `FeatureTransform` of the same columns returns. A dict of the features themselves is
    transformed by the layer, where their values are known: outside a compiled step. The layer is saved with
    the model, vocabularies included.

    Args:
        feature_columns: dense columns: numeric, bucketized, indicator, embedding.
        trainable: whether embeddings are trained.
        lengths: as for `FeatureTransform`.
    """

    def __init__(
        self,
        feature_columns: Iterable[Any],
        trainable: bool = True,
        name: str | None = None,
        lengths: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(check_dense(feature_columns), lengths, name=name, trainable=trainable, **kwargs)

    def __call__(
        self, features: Any, cols_to_output_tensors: dict[Any, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Return the matrix; put the part of each column into `cols_to_output_tensors`, if given."""
        matrix = super().__call__(features, **kwargs)
        if cols_to_output_tensors is not None:
            start = 0
            for column in self.feature_columns:
                cols_to_output_tensors[column] = matrix[:, start : start + column.width]
                start += column.width
        return matrix

    def call(self, features: Any) -> Any:
        parts = [self._output_of(column, features) for column in self.feature_columns]
        return ops.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def _output_of(self, column: Any, features: Mapping[str, Any]) -> Any:
        if isinstance(column, NumericColumn):
            values = ops.cast(features[column.name + VALUES], self.compute_dtype)
            return ops.reshape(values, (-1, column.width))
        ids, weights = self.ids_and_weights(column, features)
        if isinstance(column, EmbeddingColumn):
            return _combine(self.rows_of_table(column, ids), weights, column.combiner)
        hot = ops.one_hot(ids, column.width, dtype=self.compute_dtype)
        return ops.sum(hot * ops.expand_dims(weights, -1), axis=1)

    def compute_output_spec(self, features: Any, **kwargs: Any) -> Any:
        rows = next(iter(features.values())).shape[0]
        return keras.KerasTensor((rows, self.width), dtype=self.compute_dtype)


def _combine(rows: Any, weights: Any, combiner: str) -> Any:
    """Return one row of the table for each row's ids: [rows, dimension]; zeros if there are none."""
    if combiner != "sum":
        weights = ops.maximum(weights, 0)  # TensorFlow leaves out such ids
    total = ops.sum(rows * ops.expand_dims(weights, -1), axis=1)
    if combiner == "sum":
        return total
    parts = weights if combiner == "mean" else ops.square(weights)
    size = ops.sum(parts, axis=1, keepdims=True)
    size = ops.where(size == 0, ops.ones_like(size), size)
    return total / (size if combiner == "mean" else ops.sqrt(size))


def make_inputs(columns: Iterable[Any]) -> dict[str, Any]:
    """Return a `keras.Input` for each transformed feature of the columns, for functional models."""
    inputs: dict[str, Any] = {}
    for column in FeatureTransform(columns).columns:
        leaf = leaf_of(column)
        if isinstance(leaf, NumericColumn):
            inputs[leaf.name + VALUES] = ((leaf.width,), "float32")
        elif isinstance(leaf, SequenceNumericColumn):
            inputs[leaf.name + VALUES] = ((None, leaf.width), "float32")
        else:
            inputs[leaf.name + IDS] = ((None,), "int32")
        if isinstance(leaf, WeightedColumn):
            inputs[leaf.name + WEIGHTS] = ((None,), "float32")
        if isinstance(leaf, SequenceCategoricalColumn | SequenceNumericColumn):
            inputs[leaf.name + LENGTHS] = ((), "int32")
    return {name: keras.Input(shape, dtype=dtype, name=name) for name, (shape, dtype) in inputs.items()}


def input_layer(
    features: Mapping[str, Any],
    feature_columns: Iterable[Any],
    weight_collections: Any = None,
    trainable: bool = True,
    cols_to_vars: dict[Any, Any] | None = None,
    cols_to_output_tensors: dict[Any, Any] | None = None,
) -> Any:
    """Return the matrix of the columns for a batch, from a new `DenseFeatures` layer.

    Each call makes variables of its own: in a model, use the layer. `cols_to_vars` gets the list of variables
    of each column, `cols_to_output_tensors` its part of the matrix. Raises InputError.
    """
    if weight_collections:
        raise InputError(
            f"Collections belong to graphs of TensorFlow 1, which Keras 3 doesn't have. Received: "
            f"weight_collections={weight_collections!r}. Leave it out, and read the variables from "
            f"cols_to_vars"
        )
    layer = DenseFeatures(feature_columns, trainable=trainable)
    outputs = layer(features, cols_to_output_tensors=cols_to_output_tensors)
    if cols_to_vars is not None:
        cols_to_vars.update({column: layer.variables_of(column) for column in layer.feature_columns})
    return outputs


class _EqualSteps(FeatureTransform):
    """Transforms the features of one layer, whose columns have the same steps in each row."""

    def __call__(self, features: Features, *rest: Any) -> Any:
        result = super().__call__(features, *rest)
        found = result[0] if rest else result
        steps = {name: found[name] for name in found if name.endswith(LENGTHS)}
        first = next(iter(steps))
        for name, counts in steps.items():
            if (differs := counts != steps[first]).any():
                row = int(differs.argmax())
                raise InputError(
                    f"All columns of SequenceFeatures have the same number of steps in a row. Received: "
                    f"{steps[first][row]} of {first.removesuffix(LENGTHS)!r} and {counts[row]} of "
                    f"{name.removesuffix(LENGTHS)!r} in row {row} of the batch. Correct the rows, or pass "
                    f"each column to a layer of its own"
                )
        return result


@keras.saving.register_keras_serializable(package="insitu")
class SequenceFeatures(ColumnLayer):
    """Makes (numbers [rows, steps, width], steps of each row [rows]) of the columns, in the order of their
    names, as TensorFlow's layer does. Its input is that of `DenseFeatures`.

    Args:
        feature_columns: sequence columns: `sequence_numeric_column`, or others wrapped in `indicator_column`
            or `embedding_column`. In each row all of them have the same number of steps, which `transform`
            checks.
        trainable: whether embeddings are trained.
        lengths: steps of each row, by the name of a column, as for `FeatureTransform`.
    """

    def __init__(
        self,
        feature_columns: Iterable[Any],
        trainable: bool = True,
        name: str | None = None,
        lengths: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(check_sequence(feature_columns), lengths, name=name, trainable=trainable, **kwargs)
        self.transform = _EqualSteps(self.feature_columns, lengths)

    def call(self, features: Any) -> Any:
        parts = [self._output_of(column, features) for column in self.feature_columns]
        lengths = features[leaf_of(self.feature_columns[0]).name + LENGTHS]
        return ops.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0], lengths

    def _output_of(self, column: Any, features: Mapping[str, Any]) -> Any:
        if isinstance(column, SequenceNumericColumn):
            return ops.cast(features[column.name + VALUES], self.compute_dtype)
        ids, weights = self.ids_and_weights(column, features)
        if isinstance(column, EmbeddingColumn):
            rows = self.rows_of_table(column, ids)
        else:
            rows = ops.one_hot(ids, column.width, dtype=self.compute_dtype)
        return rows * ops.expand_dims(weights, -1)

    def compute_output_spec(self, features: Any, **kwargs: Any) -> Any:
        rows = next(iter(features.values())).shape[0]
        numbers = keras.KerasTensor((rows, None, self.width), dtype=self.compute_dtype)
        return numbers, keras.KerasTensor((rows,), dtype="int32")
