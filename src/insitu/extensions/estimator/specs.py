"""What `train_and_evaluate` is given."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from insitu.base.errors import InputError
from insitu.base.tf_signatures import class_takes_old
from insitu.train.custom_loop import InputContext

_SEED = "Call keras.utils.set_random_seed(insitu.context().seed) at the beginning of the script"
_NO_SESSIONS = "Leave it out: there are no sessions"
_ONE_STRATEGY = "Pass train_distribute: evaluations run under the same strategy"
_BY_STEPS = "Pass save_checkpoints_steps: all workers save at the same step"
_LISTENERS = "Pass a hook, or a Keras callback, whose on_epoch_end is called at each checkpoint"
_INPUT_ARGUMENTS = ("mode", "params", "config", "input_context")
"""What an input_fn is given, by name, if it has an argument of that name."""


@class_takes_old(
    tf_random_seed=_SEED,
    save_summary_steps="Pass insitu.TensorBoard() in the hooks of a training",
    save_checkpoints_secs=_BY_STEPS,
    session_config="Leave it out: there are no sessions; insitu.config sets up devices",
    keep_checkpoint_every_n_hours="Pass keep_checkpoint_max, or copy checkpoints that are to stay",
    log_step_count_steps="Pass a StepCounterHook(every_n_steps) in the hooks of a training",
    device_fn="Leave it out: variables are where the strategy places them",
    protocol=_NO_SESSIONS,
    eval_distribute=_ONE_STRATEGY,
    experimental_distribute="Pass train_distribute",
    experimental_max_worker_delay_secs="Leave it out: workers begin together",
    session_creation_timeout_secs=_NO_SESSIONS,
    checkpoint_save_graph_def="Leave it out: checkpoints have no graph",
)
@dataclass(frozen=True, slots=True)
class RunConfig:
    """Where and how often a training saves. All but `model_dir` go by name."""

    #: The folder for checkpoints and exports, a path or a URL; None: the job's own, outside a job a temporary
    #: one.
    model_dir: str | Path | None = None
    #: What follows goes by name.
    _: KW_ONLY
    #: Steps between two checkpoints.
    save_checkpoints_steps: int = 1000
    #: Checkpoints to keep.
    keep_checkpoint_max: int = 5
    #: For an Estimator: the strategy that its model is made under; None: a MultiWorkerMirroredStrategy.
    train_distribute: Any = None

    def replace(self, **changes: Any) -> RunConfig:
        """Return a config with some settings changed. Raises InputError."""
        return replace(self, **changes)

    def __post_init__(self) -> None:
        for name in ("save_checkpoints_steps", "keep_checkpoint_max"):
            check_positive("RunConfig", name, getattr(self, name))


@class_takes_old(saving_listeners=_LISTENERS)
@dataclass(frozen=True, slots=True)
class TrainSpec:
    """How to train."""

    #: Returns the data: what `fit` takes as `x`, or a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
    #: With max_steps it is read again where it ends. The function gets those of `mode`, `params`, `config`
    #: and `input_context` that it has as arguments.
    input_fn: Callable[..., Any]
    #: Updates of the model, counted over all workers and runs, after which training ends; None: it ends with
    #: the data, or by a hook. On parameter servers it then continues until a hook or `insitu stop` ends it.
    max_steps: int | None = None
    #: Hooks and Keras callbacks. Given in every task. None stands for none.
    hooks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hooks", tuple(self.hooks or ()))
        check_input("TrainSpec", self.input_fn)
        if self.max_steps is not None:
            check_positive("TrainSpec", "max_steps", self.max_steps)


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """How to evaluate."""

    #: As that of `TrainSpec`. Read again for each evaluation.
    input_fn: Callable[..., Any]
    #: Batches to evaluate on; None: all.
    steps: int | None = 100
    #: What it is on, such as "holdout": in the list of evaluations, and in the folder of their event files.
    name: str | None = None
    #: Keras callbacks for `evaluate`.
    hooks: Sequence[Any] = ()
    #: Called with each evaluation's model and scores, to publish the model.
    exporters: Any = ()
    #: Seconds from the start until the first evaluation.
    start_delay_secs: float = 120
    #: Seconds between the beginnings of two evaluations, at least. The last checkpoint is scored at once.
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        object.__setattr__(self, "hooks", tuple(self.hooks or ()))
        check_input("EvalSpec", self.input_fn)
        if self.name is not None and not (isinstance(self.name, str) and re.fullmatch(r"[\w.-]+", self.name)):
            raise InputError(
                "EvalSpec.name is the name of a folder: letters, digits, '_', '-', '.'. Received: "
                f"{self.name!r}"
            )
        check_evaluation_hooks("EvalSpec.hooks", self.hooks)
        for exporter in self.all_exporters:
            if not callable(getattr(exporter, "export", None)) or not hasattr(exporter, "name"):
                raise InputError(
                    "EvalSpec.exporters are a Latest-, Best- or FinalExporter, or another Exporter."
                    f" Received: {exporter!r}"
                )
        if self.steps is not None:
            check_positive("EvalSpec", "steps", self.steps)
        for name in ("start_delay_secs", "throttle_secs"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"EvalSpec.{name} must be a number of seconds, 0 or more. Received: {value}")

    @property
    def all_exporters(self) -> tuple[Any, ...]:
        """The exporters, of which there may be one alone or a sequence."""
        given = self.exporters
        return tuple(given) if isinstance(given, (list, tuple)) else (given,) if given else ()


def check_data(what: str, data: Any) -> Any:
    """Return what an input_fn has returned. Raises InputError for nothing, and for arrays without rows.
    `what` says whose input_fn it is."""
    leaves = keras.tree.flatten(data) if isinstance(data, (tuple, dict, np.ndarray)) else [data]
    empty = next((leaf for leaf in leaves if isinstance(leaf, np.ndarray) and not leaf.size), None)
    if data is None or empty is not None:
        received = (
            "None. Has it a `return`?" if empty is None else f"arrays without rows, of shape {empty.shape}"
        )
        raise InputError(f"The input_fn of {what} returns data with a row at least. Received: {received}")
    return data


def check_evaluation_hooks(place: str, hooks: Sequence[Any]) -> None:
    """Raise InputError for hooks in `place` that can't hear of an evaluation."""
    for hook in hooks:
        if hasattr(hook, "after_run") or not isinstance(hook, keras.callbacks.Callback):
            raise InputError(
                "An evaluation has Keras callbacks, which hear of batches in on_test_batch_end. Hooks "
                f"hear of a training alone. Received: {type(hook).__name__} in {place}"
            )


def check_input(owner: str, input_fn: Any) -> None:
    """Raise InputError for an input_fn of `owner` that isn't a function, or that needs other arguments than
    it is given."""
    if not callable(input_fn):
        raise InputError(
            f"{owner}.input_fn must be a function that returns the data. Received: "
            f"{type(input_fn).__name__}. Write `lambda: data`"
        )
    for name, parameter in _parameters_of(input_fn).items():
        is_needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        if is_needed and (name not in _INPUT_ARGUMENTS or parameter.kind is parameter.POSITIONAL_ONLY):
            raise InputError(
                f"{owner}.input_fn may have the arguments {', '.join(_INPUT_ARGUMENTS)}, by name. Received: "
                f"a function that needs {name!r}. Write `lambda: input_fn({name})`"
            )


def bind_input(
    input_fn: Callable[..., Any], mode: str, params: Mapping[str, Any], config: RunConfig
) -> Callable[[], Any]:
    """Return an input_fn without arguments. It gets those of `mode`, `params`, `config` and `input_context`
    that it has by name, as from TensorFlow's estimators. Data is of global batches, which insitu divides
    among the workers, so `input_context` is that of one pipeline."""
    given = dict(zip(_INPUT_ARGUMENTS, (mode, dict(params), config, InputContext()), strict=True))
    bound = input_fn.keywords if isinstance(input_fn, functools.partial) else {}
    taken = [
        name
        for name, parameter in _parameters_of(input_fn).items()
        if name in given and name not in bound and parameter.kind in _BY_NAME
    ]
    return functools.partial(input_fn, **{name: given[name] for name in taken}) if taken else input_fn


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        return {}


def check_positive(owner: str, name: str, value: Any) -> None:
    """Raise InputError for a setting of `owner` that isn't a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{owner}.{name} must be a whole number above 0. Received: {value!r}")
