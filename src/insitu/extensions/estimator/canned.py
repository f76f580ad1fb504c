"""Canned estimators: linear models, networks, and both together, over feature columns.

Variables begin with the values, and optimizers have the learning rates, of
tensorflow_estimator/python/estimator/canned at version 2.15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError
from insitu.base.tf_signatures import takes_old
from insitu.extensions.estimator.estimator import Estimator, WarmStartSettings
from insitu.extensions.estimator.heads import Head, RegressionHead, WeightColumn, make_class_head
from insitu.extensions.estimator.model_function import EstimatorSpec, ModeKeys, TrainOp
from insitu.extensions.estimator.specs import RunConfig
from insitu.extensions.features import CategoricalColumn, check_dense, convert_column, feature_column
from insitu.grid import Dataset

_LINEAR_RATE = 0.2
_WIDE_RATE = 0.005
_DEEP_RATE = 0.001
_LOSS_REDUCTION = (
    "The loss is the mean over rows; multiply the learning rate by the rows of a batch for their sum"
)
_OPTIMIZERS = ("Adagrad", "Adam", "Ftrl", "RMSprop", "RMSProp", "SGD")
WarmStart = str | Path | WarmStartSettings | None
LogitsAndVariables = tuple[Any, list[Any]]
"""(logits, the variables that make them)."""


class CannedEstimator(Estimator):
    """The base of canned estimators: features are transformed by their columns before the graph."""

    def __init__(
        self,
        make_spec: Callable[[Any, Any, str], EstimatorSpec],
        head: Head,
        columns: Iterable[Any],
        model_dir: str | Path | None,
        config: RunConfig | None,
        warm_start_from: WarmStart,
    ) -> None:
        self._head = head
        self._transform = feature_column.FeatureTransform(columns)

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            return make_spec(features, labels, mode)

        super().__init__(model_fn, model_dir, config, None, warm_start_from)

    def _adapt(self, data: Any) -> Any:
        if isinstance(data, Dataset):
            return data.map(self._adapt_batch)
        if isinstance(data, keras.utils.PyDataset):
            return _Transformed(data, self._adapt_batch)
        if hasattr(data, "element_spec"):
            return map_batches(data, self._adapt_batch)
        if isinstance(data, tuple):
            return self._adapt_batch(*data)
        if isinstance(data, Mapping):
            return self._adapt_batch(data)
        raise InputError(
            "A canned estimator reads features by NumPy, before the graph. Received: "
            f"{type(data).__name__}. Return an insitu.Dataset, a tf.data.Dataset, a PyDataset of Keras, or "
            "a dict of arrays and labels, from input_fn"
        )

    def _adapt_batch(self, features: Any, labels: Any = None, *rest: Any) -> Any:
        keys = self._transform.raw_keys
        if not isinstance(features, Mapping):
            features = {keys[0]: features} if len(keys) == 1 else {}
        found = self._transform(features)
        weights, weight = self._head.weights, self._head.weight_column
        if weights is not None and weight in features:
            found[weight] = weights.read(features)
        elif weight is not None and labels is not None:
            raise InputError(
                f"weight_column is a feature of the data. Received: {weight!r}, of {sorted(features)}"
            )
        return found if labels is None else (found, self._head.check_labels(labels), *rest)

    def _adapt_features(self, features: Any) -> Any:
        return self._adapt_batch(features)

    def _predict_batch(self, features: Any) -> Any:
        return self._head.add_classes(super()._predict_batch(features))

    def _known_keys(self) -> list[str]:
        known = super()._known_keys()
        return [*known, "classes", "all_class_ids", "all_classes"] if "class_ids" in known else known


class _Transformed(keras.utils.PyDataset):
    """Batches of another PyDataset, transformed."""

    def __init__(self, data: Any, transform: Callable[..., Any]) -> None:
        super().__init__(workers=data.workers, use_multiprocessing=False)
        self._data = data
        self._transform = transform

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        batch = self._data[index]
        return self._transform(*batch) if isinstance(batch, (tuple, list)) else self._transform(batch)

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()


@keras.saving.register_keras_serializable(package="insitu")
class Bias(keras.Layer):
    """Adds a trained number to each column."""

    def build(self, input_shape: Any) -> None:
        self.bias = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="bias_weights")

    def call(self, inputs: Any) -> Any:
        return inputs + self.bias


def _linear(features: Any, columns: Sequence[Any], units: int, combiner: str) -> LogitsAndVariables:
    """Return a weight for each id and each number, added up, and a bias."""
    parts: list[Any] = []
    made: list[Any] = []
    for column in sorted(columns, key=lambda column: str(column.name)):
        name = "linear_" + re.sub(r"\W", "_", column.name)
        if isinstance(column, CategoricalColumn):
            table = feature_column.embedding_column(column, units, combiner, "zeros")
            layer = feature_column.DenseFeatures([table], name=name)
            parts.append(layer(features))
            made.append(layer)
            continue
        dense = feature_column.DenseFeatures([column], name=f"{name}_input")
        layer = keras.layers.Dense(units, use_bias=False, kernel_initializer="zeros", name=name)
        parts.append(layer(dense(features)))
        made += [dense, layer]
    bias = Bias(name="linear_bias")
    total = parts[0] if len(parts) == 1 else keras.layers.Add(name="linear_sum")(parts)
    logits = bias(total)
    return logits, [v for layer in (*made, bias) for v in layer.trainable_weights]


def _network(
    features: Any,
    columns: Sequence[Any],
    units: int,
    hidden_units: Sequence[int],
    activation: Any,
    dropout: float | None,
    batch_norm: bool,
) -> LogitsAndVariables:
    """Return the logits of a network over dense columns."""
    made: list[Any] = [feature_column.DenseFeatures(columns, name="dnn_input")]
    net = made[0](features)
    for number, width in enumerate(hidden_units):
        made.append(keras.layers.Dense(width, activation, name=f"dnn_hiddenlayer_{number}"))
        net = made[-1](net)
        if dropout is not None:
            net = keras.layers.Dropout(dropout, name=f"dnn_dropout_{number}")(net)
        if batch_norm:
            made.append(keras.layers.BatchNormalization(momentum=0.999, name=f"dnn_batchnorm_{number}"))
            net = made[-1](net)
    made.append(keras.layers.Dense(units, name="dnn_logits"))
    logits = made[-1](net)
    return logits, [v for layer in made for v in layer.trainable_weights]


def _make_optimizer(given: Any, rate: float | None) -> Any:
    """Return a Keras optimizer of a name, a function that makes one, or one. Raises InputError."""
    if isinstance(given, str) and given in _OPTIMIZERS:
        made = getattr(keras.optimizers, "RMSprop" if given == "RMSProp" else given)
        return made() if rate is None else made(learning_rate=rate)
    if callable(given) and not isinstance(given, keras.optimizers.Optimizer):
        given = given()
    if not isinstance(given, keras.optimizers.Optimizer):
        raise InputError(
            f"An optimizer is one of Keras, a function that makes one, or one of {', '.join(_OPTIMIZERS)}. "
            f"Received: {given!r}"
        )
    return given


def _check_columns(columns: Any, what: str) -> tuple[Any, ...]:
    listed = tuple(map(convert_column, columns or ()))
    if not listed:
        raise InputError(f"{what} are feature columns, one at least. Received: {columns!r}")
    return listed


def _check_hidden(hidden_units: Any) -> tuple[int, ...]:
    listed = tuple(hidden_units or ())
    wrong = [n for n in listed if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if wrong or not listed:
        raise InputError(
            f"hidden_units are whole numbers above 0, one for each layer. Received: {hidden_units!r}"
        )
    return listed


class _Linear(CannedEstimator):
    def __init__(self, feature_columns: Any, head: Head, optimizer: Any, combiner: str, *rest: Any) -> None:
        columns = _check_columns(feature_columns, "feature_columns")

        def make_spec(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            logits, variables = _linear(features, columns, head.units, combiner)
            rate = min(_LINEAR_RATE, 1 / math.sqrt(len(columns))) if optimizer is None else _LINEAR_RATE
            chosen = _make_optimizer(optimizer or "Ftrl", rate) if mode == ModeKeys.TRAIN else None
            return head.spec(features, labels, mode, logits, lambda loss: TrainOp(chosen, loss, variables))

        super().__init__(make_spec, head, columns, *rest)


class LinearClassifier(_Linear):
    """Classes by a weight for each id and each number of the columns: tf.estimator.LinearClassifier."""

    @takes_old(loss_reduction=_LOSS_REDUCTION)
    def __init__(
        self,
        feature_columns: Any,
        model_dir: str | Path | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: WarmStart = None,
        *,
        sparse_combiner: str = "sum",
    ) -> None:
        head = make_class_head(n_classes, weight_column, label_vocabulary)
        super().__init__(
            feature_columns, head, optimizer, sparse_combiner, model_dir, config, warm_start_from
        )


class LinearRegressor(_Linear):
    """Numbers by a weight for each id and each number of the columns: tf.estimator.LinearRegressor."""

    @takes_old(loss_reduction=_LOSS_REDUCTION)
    def __init__(
        self,
        feature_columns: Any,
        model_dir: str | Path | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: WarmStart = None,
        *,
        sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column)
        super().__init__(
            feature_columns, head, optimizer, sparse_combiner, model_dir, config, warm_start_from
        )


class _Network(CannedEstimator):
    def __init__(
        self,
        hidden_units: Any,
        feature_columns: Any,
        head: Head,
        optimizer: Any,
        activation_fn: Any,
        dropout: float | None,
        batch_norm: bool,
        *rest: Any,
    ) -> None:
        columns = check_dense(_check_columns(feature_columns, "feature_columns"))
        widths = _check_hidden(hidden_units)

        def make_spec(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            logits, variables = _network(
                features, columns, head.units, widths, activation_fn, dropout, batch_norm
            )
            chosen = _make_optimizer(optimizer, None) if mode == ModeKeys.TRAIN else None
            return head.spec(features, labels, mode, logits, lambda loss: TrainOp(chosen, loss, variables))

        super().__init__(make_spec, head, columns, *rest)


class DNNClassifier(_Network):
    """Classes by a network over dense columns: tf.estimator.DNNClassifier."""

    @takes_old(loss_reduction=_LOSS_REDUCTION)
    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: str | Path | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: WarmStart = None,
        *,
        batch_norm: bool = False,
    ) -> None:
        head = make_class_head(n_classes, weight_column, label_vocabulary)
        network = (hidden_units, feature_columns, head, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(*network, model_dir, config, warm_start_from)


class DNNRegressor(_Network):
    """Numbers by a network over dense columns: tf.estimator.DNNRegressor."""

    @takes_old(loss_reduction=_LOSS_REDUCTION)
    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: str | Path | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: Any = "Adagrad",
        activation_fn: Any = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: WarmStart = None,
        *,
        batch_norm: bool = False,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column)
        network = (hidden_units, feature_columns, head, optimizer, activation_fn, dropout, batch_norm)
        super().__init__(*network, model_dir, config, warm_start_from)


class _Combined(CannedEstimator):
    def __init__(
        self,
        linear_feature_columns: Any,
        linear_optimizer: Any,
        dnn_feature_columns: Any,
        dnn_optimizer: Any,
        dnn_hidden_units: Any,
        dnn_activation_fn: Any,
        dnn_dropout: float | None,
        batch_norm: bool,
        combiner: str,
        head: Head,
        *rest: Any,
    ) -> None:
        wide = tuple(map(convert_column, linear_feature_columns or ()))
        deep = tuple(map(convert_column, dnn_feature_columns or ()))
        if not deep:
            wide = _check_columns(wide, "linear_feature_columns or dnn_feature_columns")
        deep = check_dense(deep) if deep else ()
        widths = _check_hidden(dnn_hidden_units) if deep else ()

        def make_spec(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            parts = []
            if deep:
                network = (widths, dnn_activation_fn, dnn_dropout, batch_norm)
                parts.append((*_network(features, deep, head.units, *network), dnn_optimizer, _DEEP_RATE))
            if wide:
                rate = min(_WIDE_RATE, 1 / math.sqrt(len(wide)))
                parts.append((*_linear(features, wide, head.units, combiner), linear_optimizer, rate))
            logits = parts[0][0] if len(parts) == 1 else parts[0][0] + parts[1][0]

            def train_op(loss: Any) -> list[TrainOp]:
                return [TrainOp(_make_optimizer(given, rate), loss, held) for _, held, given, rate in parts]

            return head.spec(features, labels, mode, logits, train_op)

        super().__init__(make_spec, head, list(dict.fromkeys((*wide, *deep))), *rest)


class DNNLinearCombinedClassifier(_Combined):
    """Classes by a wide part and a deep part, each with its optimizer: "wide and deep"."""

    @takes_old(loss_reduction=_LOSS_REDUCTION)
    def __init__(
        self,
        model_dir: str | Path | None = None,
        linear_feature_columns: Any = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Any = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Any = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: WarmStart = None,
        *,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        head = make_class_head(n_classes, weight_column, label_vocabulary)
        deep = (dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout)
        wide = (linear_feature_columns, linear_optimizer)
        rest = (model_dir, config, warm_start_from)
        super().__init__(*wide, *deep, batch_norm, linear_sparse_combiner, head, *rest)


class DNNLinearCombinedRegressor(_Combined):
    """Numbers by a wide part and a deep part, each with its optimizer: "wide and deep"."""

    @takes_old(loss_reduction=_LOSS_REDUCTION)
    def __init__(
        self,
        model_dir: str | Path | None = None,
        linear_feature_columns: Any = None,
        linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Any = None,
        dnn_optimizer: Any = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Any = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        config: RunConfig | None = None,
        warm_start_from: WarmStart = None,
        *,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column)
        deep = (dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn, dnn_dropout)
        wide = (linear_feature_columns, linear_optimizer)
        rest = (model_dir, config, warm_start_from)
        super().__init__(*wide, *deep, batch_norm, linear_sparse_combiner, head, *rest)


# Transform the batches of a tf.data.Dataset by NumPy, before the graph of a model


def map_batches(dataset: Any, transform: Callable[..., Any]) -> Any:
    """Return a tf.data.Dataset of what `transform` makes of each batch, given as NumPy arrays. The first
    batch says which arrays these are: dtypes, numbers of axes, and the lengths of the third axis and those
    behind it. The second axis has any length, or has a length of 1 in all batches.

    Raises InputError for batches that aren't dense tensors, or if there is none. A batch whose arrays are
    others raises it when it is read.
    """
    import tensorflow as tf

    spec = dataset.element_spec
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec):
            raise InputError(
                "A tf.data.Dataset for a canned estimator has dense tensors. Received: "
                f"{type(leaf).__name__}. Fill its rows up by to_tensor or padded_batch, or return an "
                "insitu.Dataset"
            )
    first = next(iter(dataset.take(1)), None)
    if first is None:
        raise InputError("An input_fn returns data with a row at least. Received: an empty tf.data.Dataset")

    def apply(batch: Any) -> Any:
        return transform(*batch) if isinstance(batch, tuple) else transform(batch)

    made = apply(tf.nest.map_structure(lambda tensor: tensor.numpy(), first))
    arrays = [np.asarray(array) for array in tf.nest.flatten(made)]
    shapes = [_find_shape(array) for array in arrays]

    def run(*leaves: Any) -> list[Any]:
        found = [np.asarray(a) for a in tf.nest.flatten(apply(tf.nest.pack_sequence_as(spec, leaves)))]
        for array, shape in zip(found, shapes, strict=True):
            _check_shape(array, shape)
        return [array.astype(like.dtype) for array, like in zip(found, arrays, strict=True)]

    def in_graph(*batch: Any) -> Any:
        leaves = tf.numpy_function(run, tf.nest.flatten(batch), [array.dtype for array in arrays])
        for leaf, shape in zip(leaves, shapes, strict=True):
            leaf.set_shape(shape)
        return tf.nest.pack_sequence_as(made, leaves)

    return dataset.map(in_graph)


def _find_shape(first: NDArray[Any]) -> list[int | None]:
    """Return the shape of an array in all batches; None: any length."""
    columns = 1 if first.shape[1:2] == (1,) else None
    return [None, columns, *first.shape[2:]][: first.ndim]


def _check_shape(array: NDArray[Any], shape: list[int | None]) -> None:
    lengths = zip(array.shape, shape, strict=False)
    if array.ndim != len(shape) or any(wanted not in (None, length) for length, wanted in lengths):
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise InputError(
            f"The batches of a tf.data.Dataset have arrays of the shapes of the first one: ({wanted}). "
            f"Received: {array.shape}. Fill rows up to one length, as by padded_batch with padded_shapes"
        )
