"""Heads: loss, metrics and predictions of the canned estimators, by the names and rules of tf.estimator.

They follow tensorflow_estimator/python/estimator/head at version 2.15, its last: the loss is
SUM_OVER_BATCH_SIZE, the sum of weighted losses divided by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from insitu.base.errors import InputError
from insitu.extensions.estimator.model_function import EstimatorSpec, ModeKeys
from insitu.extensions.features import NumericColumn, feature_column


@keras.saving.register_keras_serializable(package="insitu")
class AccuracyBaseline(keras.metrics.Metric):
    """The accuracy of a model that always predicts the more frequent of two classes."""

    def __init__(self, name: str = "accuracy_baseline", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, labels: Any, sample_weight: Any = None) -> None:
        """Add labels of 0 and 1."""
        weights = ops.ones_like(labels) if sample_weight is None else sample_weight
        self.total.assign(self.total + ops.sum(labels * weights))
        self.count.assign(self.count + ops.sum(weights))

    def result(self) -> Any:
        return ops.divide_no_nan(ops.maximum(self.total, self.count - self.total), self.count)


WeightColumn = str | NumericColumn | None
"""The feature that has the weight of each row."""


class Head:
    """The base of heads. `units` numbers of each row are the logits."""

    units: int

    def __init__(self, weight_column: WeightColumn) -> None:
        if isinstance(weight_column, str):
            weight_column = feature_column.numeric_column(weight_column)
        if weight_column is not None and (
            not isinstance(weight_column, NumericColumn) or weight_column.width != 1
        ):
            raise InputError(
                "weight_column is the name of a feature, or a numeric_column of one number a row. Received: "
                f"{weight_column!r}"
            )
        #: The column that reads the weights.
        self.weights = weight_column

    @property
    def weight_column(self) -> str | None:
        """The feature that has the weights."""
        return None if self.weights is None else self.weights.key

    def check_labels(self, labels: Any) -> Any:
        """Return labels as numbers, with a row for each. Raises InputError."""
        raise NotImplementedError

    def predictions(self, logits: Any) -> dict[str, Any]:
        """Return the predictions by name."""
        raise NotImplementedError

    def losses(self, labels: Any, logits: Any) -> Any:
        """Return the loss of each number of the labels."""
        raise NotImplementedError

    def metrics(self, labels: Any, logits: Any, losses: Any, weights: Any) -> dict[str, Any]:
        """Return updated metrics by name."""
        raise NotImplementedError

    def add_classes(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Return predictions of a batch with what no tensor can hold."""
        return predictions

    def spec(self, features: Any, labels: Any, mode: str, logits: Any, train_op: Any) -> EstimatorSpec:
        """Return the spec of a mode. `train_op` is called with the loss, to train."""
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions)
        if labels is None:
            raise InputError(
                "A canned estimator is trained and evaluated on labels. Received: features alone. Return "
                "(features, labels) from input_fn"
            )
        labels = ops.reshape(labels, (-1, 1 if isinstance(self, _Classes) else self.units))
        weights = None
        losses = self.losses(labels, logits)
        weighted = losses
        if self.weight_column is not None:
            weights = ops.reshape(ops.cast(features[self.weight_column], "float32"), (-1, 1))
            weighted = losses * weights
        loss = ops.mean(weighted)
        if mode == ModeKeys.TRAIN:
            return EstimatorSpec(mode, predictions, loss, train_op(loss))
        metrics = self.metrics(labels, logits, losses, weights)
        return EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics)


class RegressionHead(Head):
    """Means of squared differences."""

    def __init__(self, label_dimension: int = 1, weight_column: WeightColumn = None) -> None:
        super().__init__(weight_column)
        if isinstance(label_dimension, bool) or not isinstance(label_dimension, int) or label_dimension < 1:
            raise InputError(f"label_dimension is a whole number above 0. Received: {label_dimension!r}")
        self.units = label_dimension

    def check_labels(self, labels: Any) -> Any:
        numbers = np.asarray(labels)
        if numbers.dtype.kind not in "iufb" or numbers.size != len(numbers) * self.units:
            raise InputError(
                f"Labels of a regressor are {self.units} numbers a row. Received: {numbers.dtype} of shape "
                f"{numbers.shape}"
            )
        return numbers.astype(np.float32).reshape(-1, self.units)

    def predictions(self, logits: Any) -> dict[str, Any]:
        return {"predictions": logits}

    def losses(self, labels: Any, logits: Any) -> Any:
        return ops.square(logits - ops.cast(labels, "float32"))

    def metrics(self, labels: Any, logits: Any, losses: Any, weights: Any) -> dict[str, Any]:
        return {
            "average_loss": _mean(losses, weights),
            "prediction/mean": _mean(logits, weights),
            "label/mean": _mean(ops.cast(labels, "float32"), weights),
        }


class _Classes(Head):
    """What heads of classes have in common."""

    def __init__(self, n_classes: int, weight_column: WeightColumn, vocabulary: Sequence[str] | None) -> None:
        super().__init__(weight_column)
        if isinstance(n_classes, bool) or not isinstance(n_classes, int) or n_classes < 2:
            raise InputError(f"n_classes is a whole number, 2 at least. Received: {n_classes!r}")
        self.n_classes = n_classes
        self.vocabulary = None if vocabulary is None else tuple(vocabulary)
        if self.vocabulary is not None and len(set(self.vocabulary)) != n_classes:
            raise InputError(
                f"label_vocabulary has n_classes={n_classes} texts, each once. Received: "
                f"{list(self.vocabulary)}"
            )

    def check_labels(self, labels: Any) -> Any:
        given = np.asarray(labels)
        if self.vocabulary is not None:
            given = self._look_up(given)
        if given.dtype.kind not in "iufb" or given.size != len(given):
            raise InputError(
                f"Labels of a classifier are one number a row. Received: {given.dtype} of shape "
                f"{given.shape}. Pass label_vocabulary for text"
            )
        wrong = ~((given >= 0) & (given <= self.n_classes - 1))
        if wrong.any():
            row = int(np.flatnonzero(wrong.reshape(-1))[0])
            raise InputError(
                f"Labels are in [0, {self.n_classes - 1}], for n_classes={self.n_classes}. Received: "
                f"{given.reshape(-1)[row]} in row {row} of the batch"
            )
        return given.reshape(-1, 1).astype(np.float32 if self.n_classes == 2 else np.int32)

    def _look_up(self, labels: Any) -> Any:
        places = {text: place for place, text in enumerate(self.vocabulary or ())}
        texts = [each.decode() if isinstance(each, bytes) else each for each in labels.reshape(-1).tolist()]
        row = next((row for row, text in enumerate(texts) if text not in places), None)
        if row is not None:
            raise InputError(
                f"Labels are texts of label_vocabulary {list(places)}. Received: {texts[row]!r} in row {row} "
                "of the batch"
            )
        return np.array([places[text] for text in texts], np.int64)

    def add_classes(self, predictions: dict[str, Any]) -> dict[str, Any]:
        ids = predictions["class_ids"]
        names = self.vocabulary or tuple(str(number) for number in range(self.n_classes))
        classes = np.array([names[number] for number in ids.reshape(-1).tolist()], object)
        rows = (len(ids), 1)
        return {
            **predictions,
            "classes": classes.reshape(ids.shape),
            "all_class_ids": np.tile(np.arange(self.n_classes, dtype=np.int32), rows),
            "all_classes": np.tile(np.array(names, object), rows),
        }


class BinaryClassHead(_Classes):
    """Two classes, by one logit: sigmoid cross entropy. Labels may be between 0 and 1."""

    units = 1

    def __init__(self, weight_column: WeightColumn = None, vocabulary: Sequence[str] | None = None) -> None:
        super().__init__(2, weight_column, vocabulary)

    def predictions(self, logits: Any) -> dict[str, Any]:
        logistic = ops.sigmoid(logits)
        both = ops.concatenate([ops.zeros_like(logits), logits], axis=-1)
        return {
            "logits": logits,
            "logistic": logistic,
            "probabilities": ops.softmax(both),
            "class_ids": ops.expand_dims(ops.argmax(both, axis=-1), -1),
        }

    def losses(self, labels: Any, logits: Any) -> Any:
        return ops.binary_crossentropy(ops.cast(labels, "float32"), logits, from_logits=True)

    def metrics(self, labels: Any, logits: Any, losses: Any, weights: Any) -> dict[str, Any]:
        labels = ops.cast(labels, "float32")
        found = self.predictions(logits)
        logistic, ids = found["logistic"], ops.cast(found["class_ids"], "float32")
        of_pairs = {
            "accuracy": (keras.metrics.Accuracy(), ids),
            "precision": (keras.metrics.Precision(), ids),
            "recall": (keras.metrics.Recall(), ids),
            "auc": (keras.metrics.AUC(), logistic),
            "auc_precision_recall": (keras.metrics.AUC(curve="PR"), logistic),
        }
        for metric, predicted in of_pairs.values():
            metric.update_state(labels, predicted, sample_weight=weights)
        baseline = AccuracyBaseline()
        baseline.update_state(labels, sample_weight=weights)
        return {
            **{name: metric for name, (metric, _) in of_pairs.items()},
            "accuracy_baseline": baseline,
            "average_loss": _mean(losses, weights),
            "label/mean": _mean(labels, weights),
            "prediction/mean": _mean(logistic, weights),
        }


class MultiClassHead(_Classes):
    """More than two classes, by one logit each: softmax cross entropy."""

    def __init__(
        self, n_classes: int, weight_column: WeightColumn = None, vocabulary: Sequence[str] | None = None
    ) -> None:
        super().__init__(n_classes, weight_column, vocabulary)
        self.units = n_classes

    def predictions(self, logits: Any) -> dict[str, Any]:
        return {
            "logits": logits,
            "probabilities": ops.softmax(logits),
            "class_ids": ops.expand_dims(ops.argmax(logits, axis=-1), -1),
        }

    def losses(self, labels: Any, logits: Any) -> Any:
        ids = ops.cast(ops.squeeze(labels, -1), "int32")
        return ops.expand_dims(ops.sparse_categorical_crossentropy(ids, logits, from_logits=True), -1)

    def metrics(self, labels: Any, logits: Any, losses: Any, weights: Any) -> dict[str, Any]:
        accuracy = keras.metrics.Accuracy()
        accuracy.update_state(labels, self.predictions(logits)["class_ids"], sample_weight=weights)
        return {"accuracy": accuracy, "average_loss": _mean(losses, weights)}


def make_class_head(n_classes: int, weight_column: WeightColumn, vocabulary: Sequence[str] | None) -> Head:
    """Return the head for so many classes. Raises InputError."""
    if n_classes == 2:
        return BinaryClassHead(weight_column, vocabulary)
    return MultiClassHead(n_classes, weight_column, vocabulary)


def _mean(values: Any, weights: Any) -> Any:
    metric = keras.metrics.Mean()
    metric.update_state(values, sample_weight=weights)
    return metric
