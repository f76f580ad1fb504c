"""Train and evaluate by global steps: one script for chief, workers and evaluator."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.base.evaluations import Evaluation, Training, read_evaluations, record_training
from insitu.base.roster import read_roster
from insitu.extensions.estimator.early_stopping import StopIfHook
from insitu.extensions.estimator.evaluations import (
    InTurnEvaluator,
    Publisher,
    SpecEvaluator,
    find_inputs,
    is_of_training,
    name_parts,
)
from insitu.extensions.estimator.hooks import FiniteLoss, NanTensorHook, read_global_step
from insitu.extensions.estimator.model_function import ModeKeys
from insitu.extensions.estimator.server_training import (
    ServerCheckpoints,
    ServerStop,
    check_tables,
    count_steps_between,
    find_servers,
    open_store,
    plan_training,
)
from insitu.extensions.estimator.specs import EvalSpec, RunConfig, TrainSpec, bind_input, check_data
from insitu.train.checkpoint import BackupAndRestore, CheckpointStore
from insitu.train.evaluation import BATCH_SIZE, expect_ends
from insitu.train.fit import KerasTrainer, Repeated, trainer_of

# Checkpoints of a training by steps, from which the next training continues


class StepCheckpoints(BackupAndRestore):
    """Saves between the intervals of a training, and says in each checkpoint whether the training ended with
    it.

    A run of the same training continues from its checkpoint, with the state of its callbacks; where it had
    ended, nothing is trained. Another training begins where that one was, with new callbacks. Only a job
    knows that a script was started again: elsewhere another training follows what has ended.
    """

    def __init__(self, config: RunConfig, call: int, max_steps: int | None) -> None:
        """`call` is the number of the training in its script."""
        super().__init__(config.model_dir, keep=config.keep_checkpoint_max)
        self._call = call
        self._max_steps = max_steps
        self._place = config.model_dir or "the job's folder"

    def _needs_last_save(self, epochs: int) -> bool:
        # It was saved as its last interval ended.
        return False

    def _more(self, trainer: KerasTrainer, epoch: int) -> dict[str, Any]:
        # All callbacks have heard of the interval's end: who ends the training has said so.
        ended = bool(self.model.stop_training)
        return {**super()._more(trainer, epoch), "final": ended, "call": self._call, "ended": ended}

    def _enter(self, trainer: KerasTrainer, epoch: int, step: int, values: dict[str, Any], more: Any) -> None:
        super()._enter(trainer, epoch, step, values, more)
        job, call, ended = trainer.membership.context.job_id, more.get("call", -1), more.get("ended", True)
        is_own_job = more.get("job") == job
        is_own = is_own_job and call == self._call and not (ended and job is None)
        if not is_own:
            trainer.loop.forget_callbacks()
        if is_own_job and job is not None and (call > self._call or (is_own and ended)):
            trainer.loop.enter_at_end()
        elif self._max_steps is not None and read_global_step(self.model) >= self._max_steps:
            _LOG.warning("The checkpoint in %s has max_steps updates already", self._place)
            trainer.loop.enter_at_end()


ENDLESS = 1 << 31
"""Epochs of a training without max_steps."""
_LOG = logging.getLogger("insitu")
_CALLS = itertools.count()
"""Numbers the calls of `train_and_evaluate` in this script, the same in each run of it."""
_TRAININGS = itertools.count()
"""Numbers the trainings of this script, the same in each run of it."""

Scores = dict[str, float]


def train_and_evaluate(
    estimator: Any, train_spec: TrainSpec, eval_spec: EvalSpec, *, config: RunConfig | None = None
) -> tuple[Scores | None, list[Path]]:
    """Train a model for `max_steps` updates, counted over all workers, and evaluate it meanwhile.

    Call it in each task of a job, with the same arguments. With `insitu start --evaluator` the evaluator task
    scores the checkpoints beside the training. Otherwise all workers evaluate in turn: behind a checkpoint,
    where `start_delay_secs` and `throttle_secs` have passed, and at the end. The training ends at
    `max_steps`: data that ends is read again. Without `max_steps` it ends with the data. It continues from
    the last checkpoint in `model_dir`.

    `estimator` is an Estimator, or a Keras model that was compiled in a strategy's scope. For a model,
    `config` says where and how often to save; an estimator has its own.

    Returns the scores of the last evaluation with its `global_step`, and the files that exporters have
    published, in the task that evaluates or, in turn, in the chief; (None, []) elsewhere.

    Raises:
        TrainingError: for a model that wasn't compiled in a strategy's scope, one with steps_per_execution,
            or data that can be read once.
        NanLossDuringTrainingError: where the loss isn't finite. No checkpoint is written of it.
    """
    context, series, number = read_context(), None, next(_CALLS)
    model = estimator
    if hasattr(estimator, "make_trained"):
        if config is not None:
            raise TrainingError(
                "An estimator has its config. Received: another in train_and_evaluate. Pass it to the "
                "estimator."
            )
        model, train_spec, eval_spec, config = estimator.make_trained(train_spec, eval_spec)
        series = 0
    config = config or RunConfig()
    trainer = check_trained(model)
    directory = choose_directory(config, context)
    config = replace(config, model_dir=directory)
    if series is None:
        train_spec = replace(train_spec, input_fn=bind_input(train_spec.input_fn, ModeKeys.TRAIN, {}, config))
        eval_spec = replace(eval_spec, input_fn=bind_input(eval_spec.input_fn, ModeKeys.EVAL, {}, config))
    publisher = Publisher(eval_spec, _find_export_folder(directory, context))
    if context.role == "evaluator":
        evaluator = SpecEvaluator(model, eval_spec, directory, publisher, number)
        evaluator.start()
        return evaluator.scores, publisher.published
    in_turn = None if _has_evaluator(context) else InTurnEvaluator(eval_spec, publisher, context, number)
    with _noted(trainer, config, number, series):
        train(trainer, train_spec, config, in_turn, series, number)
    if in_turn is None:
        return None, []
    scores = in_turn.evaluate(model, is_final=True)
    if not context.is_chief:
        return None, []
    return {**scores, "global_step": read_global_step(model)}, publisher.published


@contextmanager
def _noted(trainer: KerasTrainer, config: RunConfig, number: int, series: int | None) -> Iterator[None]:
    """Tell the evaluator of a job whose checkpoints it is to score, and which one is the last."""
    context = trainer.membership.context
    store = open_store(trainer, config.model_dir, series, config.keep_checkpoint_max)
    if not context.is_chief or context.job is None or store is None:
        yield
        return
    fit = trainer.membership.fits if series is None else series
    record_training(context.job.trainings, Training(number, fit))
    yield
    last = store.positions()[-1:]
    record_training(context.job.trainings, Training(number, fit, True, last[0] if last else None))


class _StopAtMaxSteps(keras.callbacks.Callback):
    """Ends the training at a number of updates."""

    hears_batches = False
    """Read by `fit` under a strategy, which calls `end_step` instead: that costs less than Keras' call."""

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        self._max_steps = max_steps
        self._done = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._done = read_global_step(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hear of a step from Keras' own loop."""
        trainer = trainer_of(self.model)
        if trainer is None or trainer.callbacks is None:
            self.end_step(logs)

    def end_step(self, logs: Any) -> None:
        """Hear of a step that was done."""
        self._done += 1
        if self._done >= self._max_steps:
            self.model.stop_training = True


class _StopAtEndOfData(keras.callbacks.Callback):
    """Ends a training without a number of updates where its data ends."""

    hears_batches = False
    """Read by `fit`: it hears of epochs alone."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        trainer = trainer_of(self.model)
        if trainer is not None and trainer.loop.data is not None and trainer.loop.data.ends_with(epoch):
            self.model.stop_training = True


def train(
    trainer: KerasTrainer,
    spec: TrainSpec,
    config: RunConfig,
    in_turn: InTurnEvaluator | None,
    series: int | None,
    number: int = 0,
) -> None:
    """Train until `spec.max_steps`, with checkpoints in `config.model_dir` and evaluations by `in_turn`.
    `series` is the number of their series: 0 for all trainings of an estimator; None: that of the fit.
    `number` is that of the training, whose evaluations hooks read. Raises TrainingError for data that can be
    read once."""
    call = next(_TRAININGS)
    model, max_steps, servers = trainer.model, spec.max_steps, find_servers(trainer.model)
    if max_steps is not None and read_global_step(model) >= max_steps:
        _LOG.warning("The model has had %d updates: max_steps is reached already", read_global_step(model))
        return
    data = _read_input(spec)
    for hook in spec.hooks:
        if isinstance(hook, StopIfHook):
            hook.watch(lambda: _read_evaluations(in_turn, number))
    store = open_store(trainer, config.model_dir, series, config.keep_checkpoint_max)
    check_tables(trainer, store, _has_evaluator(trainer.membership.context))
    interval, x = config.save_checkpoints_steps, name_parts(data)
    if servers is None:
        if max_steps is not None:
            # An epoch has the steps between two checkpoints, wherever the data ends.
            x["x"] = Repeated(x["x"])
        backup: BackupAndRestore = StepCheckpoints(config, call, max_steps)
    else:
        _build(model, data, store)
        asks = any(isinstance(hook, StopIfHook) for hook in spec.hooks)
        plan_training(trainer, servers, max_steps, store, asks=asks)
        interval = count_steps_between(servers, interval)
        backup = ServerCheckpoints(config.model_dir, keep=config.keep_checkpoint_max)
    backup.fit = series
    # Without Repeated, data may end before the interval.
    with expect_ends():
        model.fit(
            **x,
            batch_size=BATCH_SIZE if isinstance(data, tuple) else None,
            epochs=ENDLESS if servers is None else max_steps or ENDLESS,
            steps_per_epoch=interval,
            # The order of batches is that of input_fn.
            shuffle=isinstance(data, tuple),
            callbacks=[backup, *_list_callbacks(trainer, spec, in_turn)],
            verbose=0,
        )


def _read_input(spec: TrainSpec) -> Any:
    """Return the data to train on. Raises TrainingError for what can be read once."""
    data = check_data("training", spec.input_fn())
    if isinstance(data, types.GeneratorType):
        raise TrainingError(
            "Training ends at max_steps, so data that ends is read again. Received: a generator. Return an "
            "insitu.Dataset, a tf.data.Dataset, a keras.utils.PyDataset or arrays from input_fn."
        )
    return data


def _list_callbacks(trainer: KerasTrainer, spec: TrainSpec, in_turn: InTurnEvaluator | None) -> list[Any]:
    """Return the callbacks of a training behind that which saves, in their order."""
    servers = find_servers(trainer.model)
    callbacks = list(spec.hooks)
    if not any(isinstance(hook, NanTensorHook) and hook.ends_well for hook in spec.hooks):
        callbacks.append(FiniteLoss())
    if servers is not None:
        callbacks.append(ServerStop(servers))
    elif spec.max_steps is not None:
        callbacks.append(_StopAtMaxSteps(spec.max_steps))
    else:
        callbacks.append(_StopAtEndOfData())
    return callbacks if in_turn is None else [*callbacks, in_turn]


def _build(model: Any, data: Any, store: CheckpointStore | None) -> None:
    """Build a model where there may be weights for it to begin with."""
    if not model.built and store is not None and store.positions():
        model(find_inputs(data))


def _read_evaluations(in_turn: InTurnEvaluator | None, number: int) -> list[Evaluation]:
    """Return what is known of a training's scores, oldest first."""
    job = read_context().job
    if job is None:
        return in_turn.found if in_turn is not None else []
    return [each for each in read_evaluations(job.evaluations) if is_of_training(each, number)]


def check_trained(model: Any) -> KerasTrainer:
    """Return the trainer of a model. Raises TrainingError for one that can't be trained by steps."""
    trainer = trainer_of(model)
    if trainer is None:
        raise TrainingError(
            "train_and_evaluate trains a Keras model that was compiled in a strategy's scope. Received: "
            f"{getattr(model, 'name', model)!r}. Make and compile it in `with strategy.scope():`, such as "
            "that of insitu.OneDeviceStrategy()."
        )
    if model.steps_per_execution != 1:
        raise TrainingError(
            "max_steps and hooks count single steps. Received: a model compiled with steps_per_execution="
            f"{model.steps_per_execution}. Compile it without."
        )
    return trainer


def choose_directory(config: RunConfig, context: Context) -> str | Path | None:
    """Return the folder for checkpoints; None for that of the job."""
    if config.model_dir is not None or context.job is not None:
        return config.model_dir
    if context.by_hand:
        raise TrainingError(
            "The processes of a cluster by TF_CONFIG save to one folder. Received: a RunConfig without "
            "model_dir. Pass config=RunConfig(model_dir=...)."
        )
    folder = tempfile.mkdtemp(prefix="insitu-")
    _LOG.warning("No model_dir was given: checkpoints are in %s", folder)
    return folder


def _find_export_folder(directory: str | Path | None, context: Context) -> Path | None:
    if directory is None:
        return context.job.exports if context.job is not None else None
    text = os.fspath(directory).removeprefix("file://")
    return None if "://" in text else Path(text) / "export"


def _has_evaluator(context: Context) -> bool:
    """Return whether the job has an evaluator task."""
    roster = read_roster(context.job.roster) if context.job is not None else None
    return roster is not None and any(member.task.role == "evaluator" for member in roster.others)
