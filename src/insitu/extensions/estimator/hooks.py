"""Hooks: what is done before and after a step, by names of its values. They are Keras callbacks as well.

A step's values are its logs, as Keras shows them: `loss` and the metrics, as means over the rows since the
epoch began. They are of all workers' rows, the same in each task, so a hook that stops the training for a
value stops it in all tasks at the same step.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from insitu.base.errors import InputError, TrainingError
from insitu.base.tf_signatures import class_takes_old, takes_old
from insitu.train.fit import trainer_of
from insitu.train.replica import count_calls_of_update, read_update_count

_LOG = logging.getLogger("insitu")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@class_takes_old(
    feed_dict="Leave it out: there are no sessions", options="Leave it out: there are no sessions"
)
@dataclass(frozen=True, slots=True)
class SessionRunArgs:
    """What `before_run` asks for: the name of a value, a list of names, or a dict of them."""

    #: Names of a step's values, such as "loss".
    fetches: Any = None


@dataclass(frozen=True, slots=True)
class SessionRunValues:
    """What `after_run` is given."""

    #: The values, in the structure of `SessionRunArgs.fetches`.
    results: Any


class SessionRunContext:
    """What a hook may do about the training."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._model

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked for the end."""
        return bool(self._model.stop_training)

    def request_stop(self) -> None:
        """End the training after this step. Ask in each task at the same step."""
        self._model.stop_training = True


class _Asked:
    """What a hook has asked for, or None."""

    args: SessionRunArgs | None = None
    is_known = False
    """Whether this process has asked: one in a lost one's place may enter behind a step's beginning."""


class SessionRunHook(keras.callbacks.Callback):
    """The base of hooks. Override `begin`, `before_run`, `after_run` and `end`.

    Raises InputError for a class with methods of TensorFlow's hooks that take a session.
    """

    # Of the class, since hooks written for TensorFlow don't call this class's __init__.
    global_step = 0
    """Updates of the model so far, over all workers and runs."""
    previous_step = 0
    """That number at the step before: on parameter servers others make updates in between."""
    _asked: _Asked
    """What `before_run` has asked for in the step under way. An object, so that it stays in this process.
    Written as a training begins."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        end = list(inspect.signature(cls.end).parameters.values())[1:]
        takes_session = any(each.default is each.empty and each.kind not in _VARIADIC for each in end)
        if takes_session or hasattr(cls, "after_create_session"):
            received = "end(self, session)" if takes_session else "after_create_session"
            raise InputError(
                f"There are no sessions: a hook has begin(self), and end(self). Received: {received} in "
                f"{cls.__name__}. Leave the session out, and read run_context.model or self.model"
            )

    def begin(self) -> None:
        """Prepare for a training. `self.global_step` is where it begins."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Hear of a step that begins. Return which of its values `after_run` is to get, or None."""

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Hear of a step that was done; `self.global_step` counts it."""

    def end(self) -> None:
        """Hear of the end of the training."""

    # Of Keras

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.steps_per_execution != 1:
            raise InputError(
                "Hooks hear of each step. Received: a model compiled with steps_per_execution="
                f"{self.model.steps_per_execution}. Compile it without"
            )
        self.global_step = self.previous_step = read_global_step(self.model)
        self._asked = _Asked()
        self.begin()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._asked.args, self._asked.is_known = self.before_run(SessionRunContext(self.model)), True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.previous_step, self.global_step = self.global_step, self._count_step()
        if not self._asked.is_known:
            self._asked.args = self.before_run(SessionRunContext(self.model))
        asked, self._asked.args, self._asked.is_known = self._asked.args, None, False
        values = None if asked is None else self._fetch(asked.fetches, logs or {})
        self.after_run(SessionRunContext(self.model), SessionRunValues(values))

    def _fetch(self, names: Any, logs: Mapping[str, Any]) -> Any:
        """Return the values of `names` out of a step's logs, in their structure. The tensor of a model_fn's
        loss names the loss."""
        is_loss = getattr(self.model, "is_training_loss", lambda tensor: False)
        return _fetch(keras.tree.map_structure(lambda name: "loss" if is_loss(name) else name, names), logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.end()

    def _count_step(self) -> int:
        """Return the number of updates behind a step."""
        updates = _count_on_servers(self.model)
        return self.global_step + 1 if updates is None else updates

    def has_passed(self, every: int) -> bool:
        """Return whether this step has brought the updates to a multiple of `every`, or past one."""
        return self.global_step // every > self.previous_step // every


def _count_on_servers(model: Any) -> int | None:
    """Return how many updates parameter servers have made; None where the model's optimizer counts them."""
    trainer = trainer_of(model)
    return trainer.strategy.count_updates() if trainer is not None else None


def read_global_step(model: Any) -> int:
    """Return how many updates `model` has had."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise TrainingError(
            "A training is counted in updates of an optimizer. Received: "
            f"{model.name!r} without one. Compile it with an optimizer."
        )
    if (calls := count_calls_of_update(optimizer)) > 1:
        raise TrainingError(
            "A training by global steps has one update for each batch. Received: an optimizer with "
            f"gradient_accumulation_steps={calls}. Leave it out, with larger batches, or train by model.fit"
        )
    on_servers = _count_on_servers(model)
    return read_update_count(optimizer) if on_servers is None else on_servers


def _fetch(names: Any, logs: Mapping[str, Any]) -> Any:
    """Return the values of `names`, in their structure."""
    if names is None:
        return None
    if isinstance(names, Mapping):
        return {key: _fetch(name, logs) for key, name in names.items()}
    if isinstance(names, (list, tuple)):
        return type(names)(_fetch(name, logs) for name in names)
    if names not in logs:
        raise InputError(
            f"A hook asks for values of a step by name: {', '.join(sorted(logs))}. Received: {names!r}"
        )
    return float(np.asarray(logs[names]))


_EVERY_STEPS = "Pass {}: steps are the same in all workers, clocks aren't"


class StopAtStepHook(SessionRunHook):
    """Ends the training after `num_steps` steps, or when the model has had `last_step` updates."""

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        super().__init__()
        if (num_steps is None) == (last_step is None):
            raise InputError(
                "StopAtStepHook takes one of num_steps and last_step. Received: "
                f"num_steps={num_steps}, last_step={last_step}"
            )
        self._num_steps = num_steps
        self._last = last_step

    def begin(self) -> None:
        if self._num_steps is not None:
            self._last = self.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._last is not None and self.global_step >= self._last:
            run_context.request_stop()


class LoggingTensorHook(SessionRunHook):
    """Prints values every `every_n_iter` steps, in the chief: `step 200: loss = 0.42, accuracy = 0.9`.

    `tensors` are names of a step's values; a dict gives them other names. `formatter` makes the text of them.
    """

    @takes_old(every_n_secs=_EVERY_STEPS.format("every_n_iter"))
    def __init__(
        self,
        tensors: Mapping[str, str] | Sequence[str],
        every_n_iter: int = 100,
        *,
        at_end: bool = False,
        formatter: Callable[[dict[str, float]], str] | None = None,
    ) -> None:
        super().__init__()
        _check_every("LoggingTensorHook", "every_n_iter", every_n_iter)
        self._names = dict(tensors) if isinstance(tensors, Mapping) else {name: name for name in tensors}
        self._every = every_n_iter
        self._at_end = at_end
        self._format = formatter or _format_values
        self._newest: dict[str, float] = {}

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return SessionRunArgs(self._names)

    def _fetch(self, names: Any, logs: Mapping[str, Any]) -> Any:
        # Reading a value waits for the step.
        return super()._fetch(names, logs) if self._at_end or self.has_passed(self._every) else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if run_values.results is not None:
            self._newest = run_values.results
            if self.has_passed(self._every):
                self._print()

    def end(self) -> None:
        if self._at_end and self._newest:
            self._print()

    def _print(self) -> None:
        if is_chief(self.model):
            sys.stdout.write(f"step {self.global_step}: {self._format(self._newest)}\n")
            sys.stdout.flush()


class StepCounterHook(SessionRunHook):
    """Prints how many steps a second were done, every `every_n_steps` steps, in the chief."""

    @takes_old(
        every_n_secs=_EVERY_STEPS.format("every_n_steps"),
        output_dir="Pass insitu.TensorBoard(), which writes steps and their time",
        summary_writer="Pass insitu.TensorBoard(), which writes steps and their time",
    )
    def __init__(self, every_n_steps: int = 100) -> None:
        super().__init__()
        _check_every("StepCounterHook", "every_n_steps", every_n_steps)
        self._every = every_n_steps
        #: When the last line was printed, by the monotonic clock; None before. An object, so that it stays in
        #: this process.
        self._since: Callable[[], float] | None = None
        #: The updates that the model had then.
        self._counted = 0

    def begin(self) -> None:
        self._since, self._counted = _stopwatch(), self.global_step

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not self.has_passed(self._every):
            return
        seconds = self._since() if self._since is not None else 0.0
        steps = self.global_step - self._counted
        self._since, self._counted = _stopwatch(), self.global_step
        if seconds and is_chief(self.model):
            sys.stdout.write(f"step {self.global_step}: {steps / seconds:.4g} steps/s\n")
            sys.stdout.flush()


class NanLossDuringTrainingError(TrainingError):
    """Raised by NanTensorHook: the loss isn't a number, or infinite."""


class NanTensorHook(SessionRunHook):
    """Ends the training where the loss of a step isn't finite: with an error, or well."""

    def __init__(self, loss_tensor: str = "loss", fail_on_nan_loss: bool = True) -> None:
        super().__init__()
        self._name = loss_tensor
        self._fails = fail_on_nan_loss

    @property
    def ends_well(self) -> bool:
        """Whether the training ends without an error."""
        return not self._fails

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        return SessionRunArgs(self._name)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if math.isfinite(run_values.results):
            return
        if self._fails:
            raise NanLossDuringTrainingError(
                f"The loss of a step must be finite. Received: {self._name} = {run_values.results} at step "
                f"{self.global_step}. Lower the learning rate, clip gradients, or look at the data."
            )
        _LOG.warning("%s is %s at step %d: training ends", self._name, run_values.results, self.global_step)
        run_context.request_stop()


class FiniteLoss(keras.callbacks.Callback):
    """Ends the training with an error where the loss since the last checkpoint isn't finite, before the next
    one is written."""

    hears_batches = False
    """Read by `fit`: it hears of epochs alone, which end with checkpoints, and costs nothing in a step."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise NanLossDuringTrainingError(
                f"The loss of a training must be finite. Received: loss = {loss} over the steps since the "
                f"last checkpoint, up to step {read_global_step(self.model)}. No checkpoint of it is "
                "written. Look at the data, lower the learning rate, or clip gradients. A NanTensorHook "
                "names the step."
            )


def is_chief(model: Any) -> bool:
    """Return whether this process does what one task does for all."""
    trainer = trainer_of(model)
    return trainer is None or trainer.membership.context.is_chief


def _check_every(hook: str, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{hook}.{name} is a number of steps, 1 or more. Received: {value!r}")


def _format_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value:.6g}" for name, value in values.items())


def _stopwatch() -> Callable[[], float]:
    began = time.monotonic()
    return lambda: time.monotonic() - began
