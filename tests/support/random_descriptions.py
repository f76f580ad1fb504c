"""Draws descriptions of small trainings with Hypothesis: data that JSON can hold, in which anything may be
combined that means the same in plain Keras and under the strategy.

Each choice shrinks to the plainest one, which stands first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Draw = Callable[[SearchStrategy[Any]], Any]
Description = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """For what a description is drawn."""

    #: of the comparison: "one", "mirrored" or "workers"; "plain" finds out what plain Keras can't do
    strategy: str
    backend: str

    @property
    def alone(self) -> bool:
        """Whether everything must be as in plain Keras, also random numbers and order."""
        return self.strategy in ("one", "plain")

    @property
    def sparse(self) -> bool:
        """Whether Keras gives gradients of tables to the optimizer by occurrence of a row. Most optimizers
        then do something else than with the gradient of the table, so that one device and several differ."""
        return self.backend == "tensorflow" and not self.alone


def pick(*values: Any) -> SearchStrategy[Any]:
    return st.sampled_from(values)


def rarely(draw: Draw, times: int = 6) -> bool:
    """True once in so many times."""
    return bool(draw(st.sampled_from(range(times))) == times - 1)


def some(draw: Draw, times: int, **choices: SearchStrategy[Any]) -> dict[str, Any]:
    """Options, each of which is given once in so many times."""
    return {name: draw(values) for name, values in choices.items() if rarely(draw, times)}


# Models

UNITS = pick(3, 1, 4, 7)
ACTIVATIONS = pick("tanh", None, "relu", "sigmoid", "gelu", "softplus")
PENALTIES = pick("l2", "l1")
COUNTED = ("calls", "rows", "rows_float", "largest", "average")


def dense(draw: Draw) -> Any:
    options = {"units": draw(UNITS), "activation": draw(ACTIVATIONS)}
    more = some(
        draw,
        10,
        use_bias=st.just(False),
        kernel_regularizer=PENALTIES,
        activity_regularizer=PENALTIES,
        kernel_constraint=pick("max_norm", "non_neg", "unit_norm"),
        trainable=st.just(False),
    )
    return ["Dense", {**options, **more}]


def layers_anywhere(draw: Draw, setting: Setting) -> list[Any]:
    """Up to two layers that take any shape."""
    deterministic = [
        ["LayerNormalization", {}],
        ["Rescaling", {"scale": 0.5, "offset": 0.1}],
        ["UnitNormalization", {}],
        ["PReLU", {}],
        ["frozen BatchNormalization", {}],
        ["ActivityRegularization", {"l2": 0.01}],
        ["own Adds", {"reduce": "mean"}],
        ["own Adds", {"reduce": "sum"}],
        *(["own Counter", {"what": what}] for what in COUNTED),
    ]
    by_chance = [
        ["Dropout", {"rate": 0.3}],
        ["Dropout", {"rate": 0.3, "seed": 5}],
        ["GaussianNoise", {"stddev": 0.2}],
        ["BatchNormalization", {"momentum": 0.5}],
    ]
    # Where only shapes can be compared there is little to find.
    choices = deterministic + (by_chance * 2 if setting.alone or rarely(draw, 8) else [])
    return [draw(pick(*choices)) for _ in range(draw(pick(0, 0, 0, 1, 1, 2)))]


def vector_tower(draw: Draw, setting: Setting) -> Description:
    layers = [["adapted Normalization", {}]] if rarely(draw, 8) else []
    for _ in range(draw(pick(1, 1, 2))):
        layers.append(dense(draw))
        layers += layers_anywhere(draw, setting)
    return {"input": "vector", "layers": layers}


def image_tower(draw: Draw, setting: Setting) -> Description:
    convolution = draw(
        pick(
            ["Conv2D", {"filters": 2, "kernel_size": 3, "activation": "relu"}],
            ["Conv2D", {"filters": 3, "kernel_size": 2, "strides": 2}],
            ["DepthwiseConv2D", {"kernel_size": 3, "activation": "tanh"}],
            ["SeparableConv2D", {"filters": 2, "kernel_size": 3}],
        )
    )
    end = draw(pick(["Flatten", {}], ["GlobalAveragePooling2D", {}], ["GlobalMaxPooling2D", {}]))
    pooling = [["MaxPooling2D", {}]] if rarely(draw, 3) else []
    return {"input": "image", "layers": [convolution, *layers_anywhere(draw, setting), *pooling, end]}


def sequence_layers(draw: Draw) -> list[Any]:
    """Layers after which a row is a vector."""
    recurrent = [draw(pick("GRU", "LSTM", "SimpleRNN")), {"units": draw(pick(3, 1))}]
    if rarely(draw, 4):
        return [["Bidirectional", {"layer": recurrent}]]
    if rarely(draw, 3):
        return [["Conv1D", {"filters": 2, "kernel_size": 2}], ["GlobalMaxPooling1D", {}]]
    return [recurrent]


def sequence_tower(draw: Draw, setting: Setting) -> Description:
    before = layers_anywhere(draw, setting) if rarely(draw, 3) else []
    return {"input": "sequence", "layers": [*before, *sequence_layers(draw)]}


def tokens_tower(draw: Draw, setting: Setting) -> Description:
    table = ["Embedding", {"input_dim": 6, "output_dim": draw(pick(2, 4))}]
    if rarely(draw, 4):
        masked = ["Embedding", {**table[1], "mask_zero": True}]
        return {"input": "tokens", "layers": [masked, draw(pick(["GRU", {"units": 3}]))]}
    end = draw(pick(["Flatten", {}], ["GlobalAveragePooling1D", {}]))
    return {"input": "tokens", "layers": [table, *layers_anywhere(draw, setting), end]}


TOWERS = (vector_tower, vector_tower, vector_tower, image_tower, tokens_tower, sequence_tower)


def tower(draw: Draw, setting: Setting) -> Description:
    made = draw(pick(*TOWERS))(draw, setting)
    return {**made, "nested": True} if rarely(draw, 6) else made


def head(draw: Draw) -> Description:
    task = draw(pick("regression", "classes", "binary", "one hot"))
    made = {"task": task, "units": draw(pick(1, 2))} if task == "regression" else {"task": task}
    return {**made, **some(draw, 8, regularizer=PENALTIES)}


@st.composite
def models(draw: Draw, setting: Setting) -> Description:
    kind = draw(pick("functional", "sequential", "subclass"))
    if kind == "sequential":
        made: Description = {"towers": [tower(draw, setting)], "heads": [head(draw)], "by": "list"}
        made |= {"deferred": True} if rarely(draw, 4) else {}
    else:
        inputs, outputs = draw(pick(1, 1, 2)), draw(pick(1, 1, 2))
        made = {
            "towers": [tower(draw, setting) for _ in range(inputs)],
            "heads": [head(draw) for _ in range(outputs)],
            "by": draw(pick("list", "dict")),
        }
    if kind == "functional" and rarely(draw, 6):
        made["own"] = draw(pick("own steps", "loss of means", "loss of sums"))
    if rarely(draw, 12):
        made["dtype"] = "float64"
    return {"kind": kind, **made}


# Compiling

LOSSES: dict[str, tuple[Any, ...]] = {
    "regression": (
        "mse",
        "mae",
        "huber",
        ["LogCosh", {}],
        ["CosineSimilarity", {}],
        ["MeanSquaredError", {"reduction": "sum"}],
        ["MeanSquaredError", {"reduction": "mean_with_sample_weight"}],
    ),
    "classes": (
        ["SparseCategoricalCrossentropy", {"from_logits": True}],
        ["SparseCategoricalCrossentropy", {"from_logits": True, "reduction": "mean"}],
        ["SparseCategoricalCrossentropy", {"from_logits": True, "ignore_class": 1}],
    ),
    "binary": (
        "binary_crossentropy",
        ["BinaryCrossentropy", {"label_smoothing": 0.1}],
        ["BinaryFocalCrossentropy", {}],
        "hinge",
        ["Dice", {}],
        ["Tversky", {}],
    ),
    "one hot": (
        "categorical_crossentropy",
        ["CategoricalFocalCrossentropy", {}],
        "kl_divergence",
        ["Dice", {}],
    ),
}
OWN_LOSSES = ("own by rows", "own of all", ["own class", {}], "own summed")

METRICS: dict[str, tuple[Any, ...]] = {
    "regression": (
        "mae",
        ["RootMeanSquaredError", {}],
        ["R2Score", {}],
        ["CosineSimilarity", {}],
        "own largest_error",
        "own mean_error",
    ),
    "classes": ("accuracy", ["SparseTopKCategoricalAccuracy", {"k": 2}]),
    "binary": (
        "accuracy",
        ["AUC", {"num_thresholds": 11}],
        ["Precision", {}],
        ["Recall", {"thresholds": 0.4}],
        "own mean_error",
    ),
    "one hot": (
        "accuracy",
        ["F1Score", {}],
        ["CategoricalCrossentropy", {}],
        ["TopKCategoricalAccuracy", {"k": 2}],
    ),
}
ANY_METRICS = (
    ["own SumOf", {}],
    *(["own Kept", {"how": how}] for how in ("max", "moving", "batches", "last")),
)

OPTIMIZERS: tuple[Any, ...] = (
    # Where a gradient is zero but for rounding, a small epsilon would make that noise large.
    ["SGD", {"learning_rate": 0.05}],
    ["SGD", {"learning_rate": 0.05, "momentum": 0.9}],
    ["SGD", {"learning_rate": 0.02, "momentum": 0.9, "nesterov": True}],
    ["Adam", {"learning_rate": 0.05, "epsilon": 0.01}],
    ["Adam", {"learning_rate": 0.05, "epsilon": 0.01, "amsgrad": True}],
    ["AdamW", {"learning_rate": 0.05, "epsilon": 0.01}],
    ["RMSprop", {"learning_rate": 0.02, "epsilon": 0.01, "momentum": 0.5}],
    ["Adagrad", {"learning_rate": 0.05, "epsilon": 0.01}],
    ["Adadelta", {"learning_rate": 0.5, "epsilon": 0.01}],
    ["Adamax", {"learning_rate": 0.05, "epsilon": 0.01}],
    ["Nadam", {"learning_rate": 0.05, "epsilon": 0.01}],
    ["Ftrl", {"learning_rate": 0.05}],
    ["Lamb", {"learning_rate": 0.02, "epsilon": 0.01}],
)
# Plain Keras on TensorFlow loses the first values of its momentum, which it sets while it traces.
ALONE = (["ScheduleFreeAdamW", {"learning_rate": 0.02, "epsilon": 0.01}], ["Lion", {"learning_rate": 0.01}])
SCHEDULES = pick(
    ["ExponentialDecay", {"initial_learning_rate": 0.05, "decay_steps": 3, "decay_rate": 0.8}],
    ["PiecewiseConstantDecay", {"boundaries": [2, 5], "values": [0.05, 0.02, 0.01]}],
    [
        "CosineDecay",
        {"initial_learning_rate": 0.01, "decay_steps": 8, "warmup_target": 0.05, "warmup_steps": 3},
    ],
)


def optimizer(draw: Draw, setting: Setting, plain: bool, half: bool) -> Description:
    """An optimizer; a `plain` one where tables have sparse gradients."""
    name, options = draw(pick(*OPTIMIZERS[: 3 if plain else None], *(ALONE if setting.alone else ())))
    found: Description = {"optimizer": [name, options]}
    if rarely(draw, 5):
        found["schedule"] = draw(SCHEDULES)
    more = some(
        draw,
        10,
        use_ema=st.just(True),
        gradient_accumulation_steps=pick(2, 3),
        loss_scale_factor=st.just(8.0),
    )
    if more.get("use_ema"):
        more |= {"ema_momentum": 0.5, **some(draw, 2, ema_overwrite_frequency=pick(2, 3))}
    if not plain:
        more |= some(draw, 10, weight_decay=st.just(0.01))
        clipping = draw(pick("clipnorm", "global_clipnorm", "clipvalue"))
        more |= some(draw, 5, **{clipping: pick(0.1, 1.0)})
    if half and not setting.alone:
        # A replica's gradient overflows at another scale than that of the global batch.
        found["scaled"] = {"initial_scale": 8.0, "dynamic_growth_steps": 2000}
    elif rarely(draw, 12):
        found["scaled"] = {
            "initial_scale": draw(pick(8.0, 2.0**15)),
            "dynamic_growth_steps": draw(pick(3, 2000)),
        }
    return {**found, "optimizer": [name, {**options, **more}]}


def has_table(model: Description) -> bool:
    return any(tower["input"] == "tokens" for tower in model["towers"])


@st.composite
def compilations(draw: Draw, setting: Setting, model: Description, half: bool = False) -> Description:
    """What `compile` gets for a model."""
    heads = model["heads"]
    plain = setting.sparse and has_table(model)
    found = optimizer(draw, setting, plain, half)
    found["losses"] = [
        draw(pick(*(OWN_LOSSES if rarely(draw, 6) and head["task"] != "classes" else LOSSES[head["task"]])))
        for head in heads
    ]
    # Half precision moves what is at a threshold to its other side.
    if not half:
        for name in ("metrics", "weighted_metrics"):
            found[name] = [_metrics(draw, head["task"]) for head in heads]
    found["by"] = "dict" if model["by"] == "dict" else draw(pick("list", "dict"))
    if model["kind"] == "subclass" and model["by"] == "list":
        found["by"] = "list"  # its outputs have no names
    if len(heads) > 1 and rarely(draw, 3):
        found["loss_weights"] = [draw(pick(1.0, 0.3, 2.0)) for _ in heads]
    found["options"] = some(
        draw,
        8,
        steps_per_execution=pick(2, 3, 4),
        run_eagerly=st.just(True),
        jit_compile=pick(True, "auto") if rarely(draw, 4) else st.just(False),
        auto_scale_loss=st.just(False),
    )
    if found["options"].get("run_eagerly"):
        found["options"].pop("jit_compile", None)
    if setting.backend == "torch":
        found["options"].pop("steps_per_execution", None)
    return found


def _metrics(draw: Draw, task: str) -> list[Any]:
    if not rarely(draw, 3):
        return []
    own = ANY_METRICS if task == "regression" and rarely(draw, 4) else ()
    return list(draw(st.lists(pick(*METRICS[task], *own), min_size=1, max_size=2, unique_by=str)))
