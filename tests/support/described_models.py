"""Makes a Keras model out of its description in plain data, which `random_models` draws.

A layer, loss, metric or optimizer is written as its name, or as [name, options]: ["Dense", {"units": 3}].
Names are those of Keras, or of the classes and functions of the tables OWN_*.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_case_tools import Run, SumOf
from keras_cases_metrics import Kept
from keras_cases_models import Adds, Counter

ops = keras.ops

INPUTS = {"vector": (4,), "image": (6, 6, 1), "sequence": (5, 3), "tokens": (4,)}
"""The shape of a row of each kind of input."""
TOKENS = 6
CLASSES = 3
HEADS = ("a", "b")
"""Names of a model's outputs."""

Description = dict[str, Any]


# Layers


def _normalization() -> Any:
    layer = keras.layers.Normalization()
    layer.adapt(np.random.default_rng(1).normal(1.0, 2.0, (20, 4)).astype("float32"))
    return layer


def _frozen(**options: Any) -> Any:
    layer = keras.layers.BatchNormalization(**options)
    layer.trainable = False
    return layer


OWN_LAYERS: dict[str, Any] = {
    "own Adds": Adds,
    "own Counter": Counter,
    "adapted Normalization": _normalization,
    "frozen BatchNormalization": _frozen,
}


def _make(module: Any, own: dict[str, Any], spec: Any) -> Any:
    """The object that a name or [name, options] stands for. A bare name of Keras stays a text."""
    name, options = (spec, None) if isinstance(spec, str) else spec
    if name in own:
        return own[name](**options) if options is not None else own[name]
    return name if options is None else getattr(module, name)(**options)


def make_layer(spec: Any) -> Any:
    name, options = spec
    given = {key: make_layer(value) if key == "layer" else value for key, value in options.items()}
    return _make(keras.layers, OWN_LAYERS, [name, given])


def make_head(head: Description, name: str) -> Any:
    """The layer of an output."""
    activation = {"binary": "sigmoid", "one hot": "softmax"}.get(head["task"])
    # Numbers of half precision are too coarse for a loss.
    return keras.layers.Dense(
        width(head), activation, name=name, dtype="float32", kernel_regularizer=head.get("regularizer")
    )


def width(head: Description) -> int:
    return {"regression": int(head.get("units", 1)), "binary": 1}.get(head["task"], CLASSES)


# Models


class Branches(keras.Model):
    """A network for each input, whose outputs are put together, and a layer for each output."""

    def __init__(self, towers: list[Any], heads: list[Any], by: str) -> None:
        super().__init__()
        self.towers, self.heads, self.by = towers, heads, by

    def call(self, x: Any) -> Any:
        inputs = [x] if len(self.towers) == 1 else list(x.values()) if isinstance(x, dict) else list(x)
        found = [tower(each) for tower, each in zip(self.towers, inputs, strict=True)]
        features = found[0] if len(found) == 1 else ops.concatenate(found, axis=-1)
        return structure([head(features) for head in self.heads], self.by, HEADS)


class StepAround(keras.Model):
    """Does what Keras does, in steps of its own."""

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        return super().test_step(*args)


class LossOfMeans(keras.Model):
    """Adds the mean of squared outputs to the loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * sum(ops.mean(ops.square(leaf)) for leaf in keras.tree.flatten(y_pred))


class LossOfSums(keras.Model):
    """Adds the sum of squared outputs to the loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.01 * sum(ops.sum(ops.square(leaf)) for leaf in keras.tree.flatten(y_pred))


OWN_MODELS: dict[str | None, Any] = {
    None: keras.Model,
    "own steps": StepAround,
    "loss of means": LossOfMeans,
    "loss of sums": LossOfSums,
}


def structure(values: list[Any], by: str, names: Any) -> Any:
    """One value alone, or several in a list or dictionary."""
    if len(values) == 1:
        return values[0]
    return dict(zip(names, values, strict=False)) if by == "dict" else values


def input_names(model: Description) -> list[str]:
    return [f"x{index}" for index in range(len(model["towers"]))]


def make_model(model: Description) -> Any:
    towers = [[make_layer(layer) for layer in tower["layers"]] for tower in model["towers"]]
    heads = [make_head(head, name) for head, name in zip(model["heads"], HEADS, strict=False)]
    if model["kind"] == "subclass":
        return Branches([keras.Sequential(layers) for layers in towers], heads, model["by"])
    kinds = [tower["input"] for tower in model["towers"]]
    if model["kind"] == "sequential":
        first = [] if model.get("deferred") else [make_input(kinds[0], "x0")]
        return keras.Sequential([*first, *towers[0], heads[0]])
    inputs = [make_input(kind, name) for kind, name in zip(kinds, input_names(model), strict=True)]
    found = []
    for tower, layers, tensor in zip(model["towers"], towers, inputs, strict=True):
        for layer in [keras.Sequential(layers)] if tower.get("nested") and layers else layers:
            tensor = layer(tensor)
        found.append(tensor)
    features = found[0] if len(found) == 1 else keras.layers.Concatenate()(found)
    outputs = structure([head(features) for head in heads], model["by"], HEADS)
    inputs = structure(inputs, model["by"], input_names(model))
    return OWN_MODELS[model.get("own")](inputs, outputs)


def make_input(kind: str, name: str) -> Any:
    return keras.Input(INPUTS[kind], name=name, dtype="int32" if kind == "tokens" else "float32")


# Losses and metrics


def loss_by_rows(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(ops.cast(y, y_pred.dtype) - y_pred), axis=-1)


def loss_of_all(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(ops.cast(y, y_pred.dtype) - y_pred))


def loss_summed(y: Any, y_pred: Any) -> Any:
    return 0.1 * ops.sum(ops.square(ops.cast(y, y_pred.dtype) - y_pred))


class LossOfRows(keras.losses.Loss):
    """A loss of the user's own class."""

    def call(self, y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(ops.cast(y, y_pred.dtype) - y_pred) ** 1.5, axis=-1)


def largest_error(y: Any, y_pred: Any) -> Any:
    return ops.max(ops.abs(ops.cast(y, y_pred.dtype) - y_pred), axis=-1)


def mean_error(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.abs(ops.cast(y, y_pred.dtype) - y_pred))


OWN_LOSSES = {
    "own by rows": loss_by_rows,
    "own of all": loss_of_all,
    "own summed": loss_summed,
    "own class": LossOfRows,
}
OWN_METRICS = {
    "own largest_error": largest_error,
    "own mean_error": mean_error,
    "own SumOf": SumOf,
    "own Kept": Kept,
}


def make_loss(spec: Any) -> Any:
    return _make(keras.losses, OWN_LOSSES, spec)


def make_metric(spec: Any) -> Any:
    return _make(keras.metrics, OWN_METRICS, spec)


# Compiling


def make_optimizer(spec: Description) -> Any:
    name, options = spec["optimizer"]
    if spec.get("schedule"):
        kind, values = spec["schedule"]
        options = {**options, "learning_rate": getattr(keras.optimizers.schedules, kind)(**values)}
    made = getattr(keras.optimizers, name)(**options)
    return keras.optimizers.LossScaleOptimizer(made, **spec["scaled"]) if spec.get("scaled") else made


def by_output(values: list[Any], by: str) -> Any:
    """What is given for each output: a value alone, a list, or a dictionary."""
    if by == "one":
        return values[0]
    return dict(zip(HEADS, values, strict=False)) if by == "dict" else values


def compile_model(model: Any, spec: Description) -> None:
    by = spec["by"] if len(spec["losses"]) > 1 else "one"
    options = dict(spec.get("options", {}))
    if keras.backend.backend() == "tensorflow":
        # XLA takes a second for each function.
        options.setdefault("jit_compile", False)
    for name in ("metrics", "weighted_metrics"):
        if any(spec.get(name, [])):
            options[name] = by_output([[make_metric(m) for m in each] for each in spec[name]], by)
    if spec.get("loss_weights"):
        options["loss_weights"] = by_output(spec["loss_weights"], by)
    losses = by_output([make_loss(loss) for loss in spec["losses"]], by)
    model.compile(make_optimizer(spec), losses, **options)


# Rows


def make_inputs(run: Run, model: Description, rows: int, tag: int, factor: float = 1.0) -> Any:
    """Rows for the model's inputs, times `factor`; other `tag`s give other rows."""
    found = []
    for index, tower in enumerate(model["towers"]):
        rng, shape = run.rng(1000 * tag + index), (rows, *INPUTS[tower["input"]])
        tokens = tower["input"] == "tokens"
        x = rng.integers(0, TOKENS, shape).astype("int32") if tokens else rng.normal(size=shape)
        found.append(x if tokens else (x * factor).astype(model.get("dtype", "float32")))
    made = structure(found, model["by"], input_names(model))
    # By their names, a functional model takes them in any order.
    is_turned = tag and model["kind"] == "functional" and isinstance(made, dict)
    return dict(reversed(made.items())) if is_turned else made


def make_labels(run: Run, model: Description, rows: int, tag: int) -> Any:
    found: list[Any] = []
    for index, head in enumerate(model["heads"]):
        rng = run.rng(1000 * tag + 100 + index)
        if head["task"] == "regression":
            found.append(rng.normal(size=(rows, width(head))).astype("float32"))
        elif head["task"] == "binary":
            found.append(rng.integers(0, 2, (rows, 1)).astype("float32"))
        else:
            numbers = rng.integers(0, CLASSES, rows)
            found.append(np.eye(CLASSES, dtype="float32")[numbers] if head["task"] == "one hot" else numbers)
    return structure(found, model["by"], HEADS)


def make_weights(run: Run, model: Description, rows: int, tag: int, kind: str) -> Any:
    """Sample weights, of each row or of each row and output; some are zero."""
    count = len(model["heads"]) if kind == "outputs" else 1
    found = [
        np.maximum(run.rng(1000 * tag + 200 + index).uniform(-0.5, 2, rows), 0).astype("float32")
        for index in range(count)
    ]
    return structure(found, model["by"], HEADS)
