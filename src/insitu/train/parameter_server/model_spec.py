"""The description of a model that a worker sends to the servers: variables, optimizer, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.parameter_server.keras_optimizer import public_class, serialize_optimizer
from insitu.train.replica import to_numpy

STATE_PREFIX = "/state/"
"""Begins the names of what the forward pass moves (BatchNorm statistics): no optimizer touches it. No path of
a variable begins with a slash."""

_BUILT_IN: dict[type, tuple[str, dict[str, str]]] = {
    keras.optimizers.SGD: ("sgd", {"momentum": "momentum", "nesterov": "nesterov"}),
    keras.optimizers.Adam: ("adam", {"beta_1": "beta_1", "beta_2": "beta_2", "epsilon": "epsilon"}),
    keras.optimizers.AdamW: ("adam", {"beta_1": "beta_1", "beta_2": "beta_2", "epsilon": "epsilon"}),
    keras.optimizers.Adagrad: (
        "adagrad",
        {"initial_accumulator_value": "initial_accumulator_value", "epsilon": "epsilon"},
    ),
    keras.optimizers.Ftrl: (
        "ftrl",
        {
            "learning_rate_power": "learning_rate_power",
            "initial_accumulator_value": "initial_accumulator_value",
            "l1_regularization_strength": "l1_regularization_strength",
            "l2_regularization_strength": "l2_regularization_strength",
            "l2_shrinkage_regularization_strength": "l2_shrinkage_regularization_strength",
            "beta": "beta",
        },
    ),
}
"""Keras' optimizer -> updater of the servers, and its settings by Keras' name of the attribute."""

_ELEMENTWISE = (
    *_BUILT_IN,
    keras.optimizers.RMSprop,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)
"""Optimizers that update each element on its own, so that a variable may be split over servers."""

INITIALIZERS = "RandomUniform, RandomNormal, Zeros, Ones and Constant"


@dataclass(frozen=True, slots=True)
class ClipNorms:
    """Bounds of gradients' norms. None: unbounded."""

    each: float | None = None
    """The bound of each variable's norm."""
    together: float | None = None
    """The bound of the norm of all variables together."""

    def clip(self, gradients: Sequence[NDArray[Any]]) -> None:
        """Scale `gradients`, one array for each variable, in place, as Keras does before its update."""
        if self.each is not None:
            for gradient in gradients:
                _scale(gradient, self.each, float(np.linalg.norm(gradient.reshape(-1))))
        if self.together is not None:
            norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients)))
            for gradient in gradients:
                _scale(gradient, self.together, norm)

    def __bool__(self) -> bool:
        return self.each is not None or self.together is not None


def _scale(gradient: NDArray[Any], bound: float, norm: float) -> None:
    if norm > bound:
        gradient *= gradient.dtype.type(bound / norm)


def to_float(scalar: Any) -> float:
    """Return the value of a variable or tensor of one element, or of a Python number."""
    if isinstance(scalar, keras.Variable):
        return float(to_numpy(scalar))
    return float(keras.ops.convert_to_numpy(scalar))


def clip_norms_of(optimizer: Any) -> ClipNorms:
    return ClipNorms(optimizer.clipnorm, optimizer.global_clipnorm)


def can_be_split(optimizer: Any) -> bool:
    """Return True if parts of a variable may be updated apart: no norm of the whole variable counts."""
    return public_class(optimizer) in _ELEMENTWISE and not clip_norms_of(optimizer)


def check_parts(parts: Mapping[str, int], optimizer: Any) -> None:
    """Raise TrainingError if a variable is cut into pieces that the optimizer can't update apart."""
    cut = next((name for name, count in parts.items() if count > 1), None)
    if cut is not None and not can_be_split(optimizer):
        raise TrainingError(
            "A variable is cut into pieces where the optimizer updates each element on its own, without a "
            f"norm. Received: {cut!r}, cut into {parts[cut]} pieces, with {type(optimizer).__name__}. Leave "
            "out variable_partitioner, or take an optimizer such as Adam without clipnorm."
        )


def needs_one_server(optimizer: Any, *, exact: bool) -> bool:
    """Return True if one server must have the gradients of all variables: for the norm of their mean, which
    no worker knows. In the other modes each worker bounds its own gradient."""
    return exact and optimizer.global_clipnorm is not None


def updater_config(optimizer: Any, *, exact: bool, jit: bool) -> dict[str, Any]:
    """Return the configuration of the updater of the model's variables on the servers, as plain values.

    `exact`: it must have the bits of the optimizer on a replica. Otherwise norms have been bounded before a
    gradient is sent.
    """
    config: dict[str, Any] = {"state": "assign" if exact else "average", "jit": jit}
    built_in = None if exact else built_in_updater(optimizer)
    if built_in is not None:
        config["built_in"] = built_in
        schedule = optimizer._learning_rate
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            config["optimizer"] = serialize_optimizer(optimizer)
    else:
        config["optimizer"] = serialize_optimizer(optimizer)
        config["without_norms"] = not exact
    return config


def built_in_updater(optimizer: Any) -> dict[str, Any] | None:
    """Return the settings of the servers' own updater of the same rule, or None."""
    known = _BUILT_IN.get(public_class(optimizer))
    plain = not optimizer.use_ema and not optimizer.gradient_accumulation_steps
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None) or set()
    if known is None or not plain or getattr(optimizer, "amsgrad", False) or excluded:
        return None
    name, settings = known
    config: dict[str, Any] = {"name": name, **{k: getattr(optimizer, a) for k, a in settings.items()}}
    if optimizer.weight_decay:
        config["weight_decay"] = float(optimizer.weight_decay)
    if optimizer.clipvalue is not None:
        config["clip_value"] = float(optimizer.clipvalue)
    config["learning_rate"] = to_float(optimizer.learning_rate)
    return config


def table_updater(optimizer: Any) -> dict[str, Any]:
    """Return the settings of the updater of tables' rows. Raises TrainingError if there is none."""
    config = built_in_updater(optimizer)
    if config is None or isinstance(
        optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule
    ):
        raise TrainingError(
            "Rows of an Embedding on servers are updated by SGD, Adam, AdamW, Adagrad or Ftrl with a "
            "constant learning rate, without EMA or amsgrad. Received: "
            f"{type(optimizer).__name__}. Give another one for the tables alone: "
            "ParameterServerStrategy(table_optimizer=keras.optimizers.Adagrad(0.05))."
        )
    return config


def check_norms_of_rows(optimizer: Any) -> None:
    """Raise TrainingError if `optimizer` bounds norms, which nobody does for rows of tables."""
    for name in ("clipnorm", "global_clipnorm"):
        if getattr(optimizer, name, None) is not None:
            raise TrainingError(
                "Norms of gradients are bounded for rows of tables in mode async and bounded alone, by the "
                f"model's optimizer. Received: {name}={getattr(optimizer, name)} for the rows. Give tables "
                "an optimizer without, such as table_optimizer=keras.optimizers.Adagrad(0.05); clipvalue, "
                "which bounds each element, may stay."
            )


def initializer_config(initializer: Any) -> dict[str, Any]:
    """Return the servers' initializer of new rows. Raises TrainingError for one that they don't have."""
    kinds = keras.initializers
    if isinstance(initializer, kinds.RandomUniform):
        return {"name": "uniform", "low": float(initializer.minval), "high": float(initializer.maxval)}
    if isinstance(initializer, kinds.RandomNormal):
        return {"name": "normal", "mean": float(initializer.mean), "deviation": float(initializer.stddev)}
    if isinstance(initializer, kinds.Zeros):
        return {"name": "constant", "value": 0.0}
    if isinstance(initializer, kinds.Ones):
        return {"name": "constant", "value": 1.0}
    if isinstance(initializer, kinds.Constant) and np.ndim(initializer.value) == 0:
        return {"name": "constant", "value": float(initializer.value)}
    raise TrainingError(
        f"Rows on servers are initialised by {INITIALIZERS}. Received: {type(initializer).__name__}"
    )


def refuse_recompile() -> NoReturn:
    """Raise TrainingError: the servers have the optimizer that the model was first trained with."""
    raise TrainingError(
        "A model on parameter servers is compiled once: the servers hold its optimizer. Received: compile(), "
        "another optimizer or other trainable layers after its first fit, evaluate or predict. Start another "
        "job with the weights of this one, or use MultiWorkerMirroredStrategy."
    )


def name_variables(named: Sequence[tuple[str, Any]]) -> list[str]:
    """Return a unique name for each (prefix, variable): its path, numbered if a path repeats."""
    seen: dict[str, int] = {}
    names = []
    for prefix, variable in named:
        path = prefix + variable.path
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return names


def strip_worker_settings(config: Mapping[str, Any], *, norms: bool) -> dict[str, Any]:
    """Return a serialized optimizer without the settings that workers have applied before they push: the loss
    scale and, unless `norms`, the bounds of norms."""
    done = {"loss_scale_factor": None, **({} if norms else {"clipnorm": None, "global_clipnorm": None})}
    return {**config, "config": {k: done.get(k, v) for k, v in config["config"].items()}}
