"""`SequenceFeatures`: the layer that makes a sequence of rows of numbers for each row of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
from keras import ops

from insitu.base.errors import InputError
from insitu.train.features.column_layer import ColumnLayer
from insitu.train.features.dense_columns import EmbeddingColumn, leaf_of
from insitu.train.features.raw_values import Features
from insitu.train.features.sequence import SequenceNumericColumn
from insitu.train.features.transform import LENGTHS, VALUES, FeatureTransform, check_sequence


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
