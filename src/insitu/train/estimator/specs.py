"""What `train_and_evaluate` is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from insitu.errors import InputError
from insitu.old_arguments import class_takes_old

_SEED = "Call keras.utils.set_random_seed(insitu.context().seed) at the beginning of the script"
_NO_SESSIONS = "Leave it out: there are no sessions"
_ONE_STRATEGY = "Pass train_distribute: evaluations run under the same strategy"
_BY_STEPS = "Pass save_checkpoints_steps: all workers save at the same step"
_LISTENERS = "Pass a hook, or a Keras callback, whose on_epoch_end is called at each checkpoint"
_EVALUATION_NAME = "Leave it out: the evaluations of each training are kept apart"


@class_takes_old(
    tf_random_seed=_SEED,
    save_summary_steps="Pass insitu.TensorBoard() in the hooks of a training",
    save_checkpoints_secs=_BY_STEPS,
    session_config="Leave it out: there are no sessions; insitu.config sets up devices",
    keep_checkpoint_every_n_hours="Pass keep_checkpoint_max, or copy checkpoints that are to stay",
    log_step_count_steps="Pass a StepCounterHook(every_n_steps) in the hooks of a training",
    device_fn="Leave it out: variables lie where the strategy places them",
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
    #: When it ends it is read again.
    input_fn: Callable[[], Any]
    #: Updates of the model, counted over all workers and runs, after which training ends; None: it goes on
    #: until a hook or `insitu stop` ends it.
    max_steps: int | None = None
    #: Hooks and Keras callbacks. Given in every task. None stands for none.
    hooks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hooks", tuple(self.hooks or ()))
        check_input("TrainSpec", self.input_fn)
        if self.max_steps is not None:
            check_positive("TrainSpec", "max_steps", self.max_steps)


@class_takes_old(name=_EVALUATION_NAME)
@dataclass(frozen=True, slots=True)
class EvalSpec:
    """How to evaluate."""

    #: As that of `TrainSpec`. Read again for each evaluation.
    input_fn: Callable[[], Any]
    #: Batches to evaluate on; None: all.
    steps: int | None = 100
    #: What follows goes by name.
    _: KW_ONLY
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
        for hook in self.hooks:
            if hasattr(hook, "after_run") or not isinstance(hook, keras.callbacks.Callback):
                raise InputError(
                    "An evaluation has Keras callbacks, which hear of batches in on_test_batch_end. Hooks "
                    f"hear of a training alone. Received: {type(hook).__name__} in EvalSpec.hooks"
                )
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


def check_input(owner: str, input_fn: Any) -> None:
    """Raise InputError for an input_fn of `owner` that isn't a function."""
    if not callable(input_fn):
        raise InputError(
            f"{owner}.input_fn must be a function that returns the data. Received: "
            f"{type(input_fn).__name__}. Write `lambda: data`"
        )


def check_positive(owner: str, name: str, value: Any) -> None:
    """Raise InputError for a setting of `owner` that isn't a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{owner}.{name} must be a whole number above 0. Received: {value!r}")
