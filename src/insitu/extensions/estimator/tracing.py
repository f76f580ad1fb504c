"""Run a model_fn on symbolic inputs, so that its calls become graphs that share layers by name.

Each mode is a run of its own, as it was a graph of its own in TensorFlow 1. Names of layers are counted from
the beginning in each run. So a layer of a later run finds the layer of the first by its name, as variables
found theirs in a checkpoint, and is replaced by it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.common.variables import Variable

from insitu.base.errors import InputError

_UIDS = "object_name_uids"
"""Where Keras counts the names that it gives."""


@dataclass(frozen=True, slots=True)
class Update:
    """A call of a metric's `update_state`."""

    #: The metric.
    metric: Any
    #: The arguments by place; tensors are symbolic.
    args: tuple[Any, ...]
    #: The arguments by name.
    kwargs: dict[str, Any]


class LossOperation(keras.Operation):
    """A loss of Keras as an operation of a graph: it divides by the number of rows, which a graph doesn't
    know yet."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self._loss = loss

    def call(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Return the loss of a batch."""
        return self._loss(y_true, y_pred, sample_weight=sample_weight)

    def compute_output_spec(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if self._loss.reduction not in (None, "none"):
            return keras.KerasTensor((), dtype=self._loss.dtype)
        return super().compute_output_spec(y_true, y_pred, sample_weight=sample_weight)


class Trace:
    """One run of a model_fn. `kept` are the layers of the first run by name; empty in the first run."""

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self._kept = kept
        #: Layers that were called, by name.
        self.layers: dict[str, Any] = {}
        #: Calls of update_state, in their order.
        self.updates: list[Update] = []
        #: Metrics that were made here.
        self._metrics: list[Any] = []
        #: Calls of layers, and makings of weights, that are under way within each other.
        self._depth = 0
        self._thread = threading.get_ident()

    def updates_of(self, metric: Any) -> list[Update]:
        """Return the updates of one metric."""
        return [update for update in self.updates if update.metric is metric]

    @property
    def _is_outermost(self) -> bool:
        return self._depth == 0 and threading.get_ident() == self._thread

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the layers, losses, metrics and variables that are made and called while open."""
        before = global_state.get_global_attribute(_UIDS)
        with ExitStack() as stack:
            for owner, name, wrap in (
                (keras.Layer, "__call__", self._wrap_call),
                (keras.Layer, "add_weight", self._wrap_deeper),
                (keras.losses.Loss, "__call__", self._wrap_loss),
                (keras.metrics.Metric, "__init__", self._wrap_metric),
                (Variable, "__init__", self._wrap_variable),
            ):
                original = vars(owner)[name]
                setattr(owner, name, wrap(original))
                stack.callback(setattr, owner, name, original)
            global_state.set_global_attribute(_UIDS, collections.defaultdict(int))
            stack.callback(global_state.set_global_attribute, _UIDS, before)
            stack.callback(self._release_metrics)
            yield

    def _release_metrics(self) -> None:
        for metric in self._metrics:
            vars(metric).pop("update_state", None)

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_outermost or not any_symbolic_tensors(args, kwargs):
                return original(layer, *args, **kwargs)
            layer = self._find(layer)
            self._depth += 1
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _wrap_deeper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return method

    def _find(self, layer: Any) -> Any:
        """Return the layer to call in place of `layer`: that of its name in the first run. Raises
        InputError."""
        other = self.layers.setdefault(layer.name, layer)
        if other is not layer:
            raise InputError(
                f"Each layer of a model_fn has a name of its own. Received: two named {layer.name!r}. Leave "
                "out one of the names"
            )
        kept = self._kept.get(layer.name)
        if kept is None or kept is layer:
            return layer
        if type(kept) is not type(layer) or not _have_same_config(kept, layer):
            raise InputError(
                "Layers of one name are the same in all modes, so that they share their weights. Received: "
                f"{layer.name!r}, which differs from that of mode 'train'. Make the layers with weights in "
                "one order and with the same arguments in each mode, or give them names"
            )
        return kept

    def _wrap_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            if self._is_outermost and any_symbolic_tensors((y_true, y_pred, sample_weight)):
                return LossOperation(loss)(y_true, y_pred, sample_weight=sample_weight)
            return original(loss, y_true, y_pred, sample_weight)

        return call

    def _wrap_metric(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(metric: Any, *args: Any, **kwargs: Any) -> None:
            original(metric, *args, **kwargs)

            def update_state(*args: Any, **kwargs: Any) -> None:
                self.updates.append(_record(metric, args, kwargs))

            if threading.get_ident() == self._thread:
                # In the instance, before the method of its class.
                vars(metric)["update_state"] = update_state
                self._metrics.append(metric)

        return init

    def _wrap_variable(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(variable: Any, *args: Any, **kwargs: Any) -> None:
            trainable = args[3] if len(args) > 3 else kwargs.get("trainable", True)
            if self._is_outermost and trainable:
                raise InputError(
                    "Trainable variables of a model_fn belong to layers, which find them again in each mode. "
                    "Received: a keras.Variable. Make it by add_weight in a layer of your own"
                )
            original(variable, *args, **kwargs)

        return init


def _record(metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Update:
    """Return an update in which rows of one number, [rows], are [rows, 1].

    Metrics such as MeanAbsoluteError take the mean over the last axis first. Over [rows] that is the mean of
    a batch, so that a shorter batch counted as much as others; tf.metrics took the mean over all rows.
    """
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        names = ("y_true", "y_pred")
        given = {**kwargs, **dict(zip((*names, "sample_weight"), args, strict=False))}
        found = [given.get(name) for name in names]
        if all(isinstance(each, keras.KerasTensor) and len(each.shape) == 1 for each in found):
            given |= {name: keras.ops.expand_dims(given[name], -1) for name in names}
            return Update(metric, (), given)
    return Update(metric, args, kwargs)


def _have_same_config(one: Any, other: Any) -> bool:
    try:
        return bool(_comparable(one.get_config()) == _comparable(other.get_config()))
    except NotImplementedError:
        raise InputError(
            "Layers of a model_fn are compared by get_config, to share their weights between modes. "
            f"Received: {type(one).__name__} {one.name!r} without. Write its get_config"
        ) from None


def _comparable(value: Any) -> Any:
    """Return a config as plain values."""
    if isinstance(value, dict):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value]
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return repr(keras.saving.serialize_keras_object(value))
