"""The Keras model of a model_fn: a graph for each mode, over the same layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from insitu.base.errors import InputError, InsituError
from insitu.extensions.estimator.model_function import (
    EstimatorSpec,
    ModeKeys,
    ModelFn,
    call_model_fn,
    make_optimizer,
)
from insitu.extensions.estimator.tracing import Trace, Update

_DEFAULT_SIGNATURE = "serving_default"


class Graph:
    """The graph of one mode."""

    def __init__(
        self, spec: EstimatorSpec, trace: Trace, model: Any, updates: Sequence[Update], served: Any = None
    ) -> None:
        self.spec = spec
        self.trace = trace
        #: A functional model of the inputs: of the loss and the metrics' inputs, or of the predictions.
        self.model = model
        #: What the metrics of evaluation are updated by.
        self.updates = updates
        #: The functional model to export; None but for predictions.
        self.served = served


@dataclass(slots=True)
class _Hidden:
    """What a model keeps out of Keras' tracking."""

    #: Returns the spec of (features, labels, mode).
    run: Callable[..., EstimatorSpec]
    #: Specs of the features.
    features: Any
    #: Specs of the labels; None if there are none.
    labels: Any
    #: The graph of each mode, or why there is none.
    graphs: dict[str, Graph | Exception]


class GraphModel(keras.Model):
    """Trains and evaluates what a model_fn says. Features and labels are its inputs, since both enter the
    graph. Made in a strategy's scope, and compiled with the optimizer of the train_op.

    Args:
        run: returns the spec of (features, labels, mode), on symbolic tensors.
        features: a batch of them.
        labels: a batch of them, or None.
    """

    computes_own_numbers = True
    """Read by the probe: loss and metrics are computed by a user's function."""

    def __init__(self, run: Callable[..., EstimatorSpec], features: Any, labels: Any) -> None:
        super().__init__(name="estimator")
        map_structure = keras.tree.map_structure
        labels = None if labels is None else map_structure(_Spec, labels)
        hidden = _Hidden(run, map_structure(_Spec, features), labels, {})
        object.__setattr__(self, "_hidden", hidden)
        trained = self._trace(ModeKeys.TRAIN, {})
        hidden.graphs[ModeKeys.TRAIN] = trained
        # Tracked by Keras. All weights of the other modes are among its own.
        self.trained = trained.model
        for mode in (ModeKeys.EVAL, ModeKeys.PREDICT):
            hidden.graphs[mode] = self._try(mode, trained.trace)
        evaluated = hidden.graphs[ModeKeys.EVAL]
        named = dict(evaluated.spec.eval_metric_ops or {}) if isinstance(evaluated, Graph) else {}
        self._metric_names = tuple(named)
        self.evaluation_metrics = list(named.values())
        self.built = True
        self.compile(optimizer=make_optimizer(trained.spec, self.trainable_variables))

    @property
    def predicting_model(self) -> Any:
        """The functional model of the predictions."""
        return self._graph(ModeKeys.PREDICT).model

    @property
    def served_model(self) -> Any:
        """The model to export: a functional one, of Keras' and the user's layers."""
        return self._graph(ModeKeys.PREDICT).served

    @property
    def training_hooks(self) -> tuple[Any, ...]:
        """The hooks that model_fn gives a training. Those of the chief say so in `runs_in_chief_alone`."""
        spec = self._graph(ModeKeys.TRAIN).spec
        for hook in spec.training_chief_hooks or ():
            hook.runs_in_chief_alone = True
        return (*(spec.training_hooks or ()), *(spec.training_chief_hooks or ()))

    @property
    def evaluation_hooks(self) -> tuple[Any, ...]:
        """The callbacks that model_fn gives an evaluation."""
        return tuple(self._graph(ModeKeys.EVAL).spec.evaluation_hooks or ())

    def is_training_loss(self, tensor: Any) -> bool:
        """Return whether a tensor of model_fn is the loss of training."""
        return tensor is self._graph(ModeKeys.TRAIN).spec.loss

    def check_mode(self, mode: str) -> None:
        """Raise InputError if model_fn gives no graph for a mode."""
        self._graph(mode)

    def _graph(self, mode: str) -> Graph:
        hidden: _Hidden = self._hidden
        found = hidden.graphs[mode]
        if isinstance(found, Graph):
            return found
        if isinstance(found, InsituError):
            raise found
        raise InputError(
            f"model_fn is called for each mode that is used. Received: for mode {mode!r} "
            f"{type(found).__name__}: {found}"
        ) from found

    def _try(self, mode: str, trained: Trace) -> Graph | Exception:
        """Return the graph of a mode, or why there is none: a model_fn may be made for some modes alone."""
        try:
            graph = self._trace(mode, trained.layers)
            self._check_weights(graph, mode)
            return graph
        except Exception as error:
            return error

    def _check_weights(self, graph: Graph, mode: str) -> None:
        known = {id(variable) for variable in self.trained.variables}
        for layer in graph.model.layers:
            strange = next((v for v in layer.weights if id(v) not in known), None)
            if strange is not None:
                raise InputError(
                    f"Weights that mode {mode!r} uses are those of mode 'train'. Received: {strange.path!r}, "
                    "which no training would change. Call the same layers in both modes"
                )

    def _trace(self, mode: str, kept: Any) -> Graph:
        hidden: _Hidden = self._hidden
        trace, name = Trace(kept), f"model_{mode}"
        with trace.running():
            features = _make_inputs(hidden.features, "features")
            if mode == ModeKeys.PREDICT:
                spec = hidden.run(features, None, mode)
                predicting = served = _make_model(features, spec.predictions, name)
                if spec.export_outputs:
                    served = _make_model(features, _choose_export(spec), "served")
                return Graph(spec, trace, predicting, [], served)
            labels = None if hidden.labels is None else _make_inputs(hidden.labels, "labels")
            spec = hidden.run(features, labels, mode)
            updates = _list_updates(spec, trace) if mode == ModeKeys.EVAL else []
            outputs: dict[str, Any] = {"loss": spec.loss}
            if updates:
                outputs["updates"] = [_symbolic(update) for update in updates]
            return Graph(spec, trace, keras.Model(_flat(features, labels), outputs, name=name), updates)

    # Of Keras

    def train_step(self, *args: Any) -> Any:
        """Do Keras' step on features and labels as inputs."""
        return super().train_step(*args[:-1], self._pack(args[-1]))

    def test_step(self, *args: Any) -> Any:
        """Do Keras' step on features and labels as inputs."""
        self._graph(ModeKeys.EVAL)
        return super().test_step(*args[:-1], self._pack(args[-1]))

    def _pack(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        if weights is not None:
            raise InputError(
                "An input_fn returns features and labels. Received: sample weights too. Make them a feature, "
                "which model_fn puts into its loss"
            )
        hidden: _Hidden = self._hidden
        _check_keys(x, hidden.features, "features")
        if hidden.labels is None:
            y = None
        elif y is None:
            raise InputError("An input_fn for this model_fn returns (features, labels). Received: no labels")
        else:
            _check_keys(y, hidden.labels, "labels")
        return (_flat(x, y),)

    def call(self, data: Any, training: bool | None = None) -> Any:
        """Return the loss, and what metrics are updated by."""
        mode = ModeKeys.TRAIN if training else ModeKeys.EVAL
        return self._graph(mode).model(data, training=bool(training))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Return the model_fn's loss and, as Keras does, those of the layers' regularizers and add_loss."""
        total = y_pred["loss"]
        for loss in self.losses:
            total = total + self._aggregate_additional_loss(loss)
        return total

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Update the metrics of evaluation. Returns the logs."""
        logs = {"loss": self._loss_tracker.result()}
        if "updates" in y_pred:
            for update, tensors in zip(self._graph(ModeKeys.EVAL).updates, y_pred["updates"], strict=True):
                args, kwargs = _with_tensors(update, tensors)
                update.metric.update_state(*args, **kwargs)
            named = zip(self._metric_names, self.evaluation_metrics, strict=True)
            logs.update({name: metric.result() for name, metric in named})
        return logs


def make_graph_model(model_fn: ModelFn, params: Any, config: Any, features: Any, labels: Any) -> GraphModel:
    """Return the model of a model_fn for batches like those given. Raises InputError."""

    def run(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return call_model_fn(model_fn, features, labels, mode, params, config)

    for what, tree in (("features", features), ("labels", labels)):
        for leaf in keras.tree.flatten(tree):
            if leaf is not None and str(leaf.dtype).startswith(("str", "object", "<U", "|S", "|O")):
                raise InputError(
                    f"A model_fn gets numbers, on each backend. Received: {what} of text. Look them up "
                    "before the graph, by insitu.feature_column.FeatureTransform"
                )
    return GraphModel(run, features, labels)


def _flat(features: Any, labels: Any) -> list[Any]:
    """Return the inputs of a graph, in their order."""
    return [each for each in keras.tree.flatten((features, labels)) if each is not None]


class _Spec:
    """Shape of a row, and dtype, of an input."""

    def __init__(self, leaf: Any) -> None:
        self.shape = tuple(leaf.shape)[1:]
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        if dtype in ("int64", "uint64") and keras.backend.backend() == "jax":
            dtype = dtype.replace("64", "32")  # by default JAX has no other
        # As Keras gives arrays to a model.
        self.dtype = keras.config.floatx() if dtype == "float64" else dtype


def _make_inputs(specs: Any, what: str) -> Any:
    """Return inputs of a graph like `specs`: features have the names of their keys."""

    def make(path: tuple[Any, ...], spec: _Spec) -> Any:
        parts = [str(part) for part in path]
        name = "_".join(parts if what == "features" and parts else [what, *parts])
        return keras.Input(spec.shape, dtype=spec.dtype, name=name)

    paths = keras.tree.flatten_with_path(specs)
    return keras.tree.pack_sequence_as(specs, [make(path, spec) for path, spec in paths])


def _make_model(features: Any, outputs: Any, name: str) -> Any:
    """Return the model of predictions. Of a dict of features it takes those alone that they depend on: who
    asks for predictions has no weights of rows, for example."""
    if isinstance(features, Mapping):
        needed = _find_sources(outputs)
        used = {key: each for key, each in features.items() if needed & {*map(id, keras.tree.flatten(each))}}
        features = used or features
    return keras.Model(features, outputs, name=name)


def _find_sources(outputs: Any) -> set[int]:
    """Return the ids of the tensors that `outputs` are computed from, inputs of the graph among them."""
    found: set[int] = set()
    left = [leaf for leaf in keras.tree.flatten(outputs) if isinstance(leaf, keras.KerasTensor)]
    while left:
        tensor = left.pop()
        if id(tensor) not in found:
            found.add(id(tensor))
            operation, node, _ = tensor._keras_history
            left.extend(operation._inbound_nodes[node].input_tensors)
    return found


def pick_inputs(model: Any, features: Any) -> Any:
    """Return those of a dict of features that a model of predictions takes. Raises InputError if one
    lacks."""
    taken = model.input
    if not isinstance(taken, Mapping) or not isinstance(features, Mapping):
        return features
    missing = [key for key in taken if key not in features]
    if missing:
        raise InputError(
            f"Predictions are made from the features {', '.join(map(str, taken))}. Received: none named "
            f"{missing[0]!r}. Return it from input_fn"
        )
    return {key: features[key] for key in taken}


def _check_keys(given: Any, specs: Any, what: str) -> None:
    """Raise InputError if a batch has other keys than the first one had."""
    one, other = (_paths(tree) for tree in (given, specs))
    if one != other:
        raise InputError(
            f"All batches have the same {what}. Received: {', '.join(one)}, where the first batch had "
            f"{', '.join(other)}"
        )


def _paths(tree: Any) -> list[str]:
    return ["/".join(str(part) for part in path) for path, _ in keras.tree.flatten_with_path(tree)]


def _list_updates(spec: EstimatorSpec, trace: Trace) -> list[Update]:
    """Return the updates of the metrics that the spec names. Raises InputError."""
    updates = []
    for name, metric in (spec.eval_metric_ops or {}).items():
        if name == "loss" or not isinstance(metric, keras.metrics.Metric):
            raise InputError(
                "eval_metric_ops are Keras metrics by name, beside `loss`. Received: "
                f"{name!r}: {metric!r}. Make such as keras.metrics.BinaryAccuracy(), and call its "
                "update_state"
            )
        found = trace.updates_of(metric)
        if not found:
            raise InputError(
                "A metric of eval_metric_ops is made and updated in model_fn. Received: "
                f"{name!r} without. Call update_state(labels, predictions) there"
            )
        updates += found
    return updates


def _symbolic(update: Update) -> list[Any]:
    leaves = keras.tree.flatten((update.args, update.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, keras.KerasTensor)]


def _with_tensors(update: Update, tensors: Sequence[Any]) -> Any:
    """Return the arguments of an update, with tensors in place of the symbolic ones."""
    given = iter(tensors)
    return keras.tree.map_structure(
        lambda leaf: next(given) if isinstance(leaf, keras.KerasTensor) else leaf,
        (update.args, update.kwargs),
    )


def _choose_export(spec: EstimatorSpec) -> Any:
    """Return the outputs of the exported model. Raises InputError for several signatures."""
    outputs = spec.export_outputs or {}
    if list(outputs) != [_DEFAULT_SIGNATURE]:
        raise InputError(
            f"export_outputs has the one key {_DEFAULT_SIGNATURE!r}. Received: {', '.join(outputs)}. Export "
            "further outputs by an estimator of their own"
        )
    return outputs[_DEFAULT_SIGNATURE]
