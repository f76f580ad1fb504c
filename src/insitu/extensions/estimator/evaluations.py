"""Evaluations as an EvalSpec asks for: beside the training in the evaluator task, or in turn with it."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from insitu.base.context import Context
from insitu.base.errors import InputError, InsituError
from insitu.base.evaluations import Evaluation, Training, append_evaluation, find_training, read_evaluations
from insitu.extensions.estimator.early_stopping import agree
from insitu.extensions.estimator.graph_model import pick_inputs
from insitu.extensions.estimator.hooks import read_global_step
from insitu.extensions.estimator.server_training import find_servers
from insitu.extensions.estimator.specs import EvalSpec, check_data
from insitu.grid import Dataset
from insitu.train.evaluation import BATCH_SIZE, Candidate, Loaded, SidecarEvaluator, expect_ends
from insitu.train.fit import find_shards_of, trainer_of

_LOG = logging.getLogger("insitu")


class Pace:
    """Tells when the next evaluation is due, by the clock of this process."""

    def __init__(self, spec: EvalSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._throttle = spec.throttle_secs
        #: The time, in seconds of the clock, from which on an evaluation is due.
        self._due = clock() + spec.start_delay_secs

    def is_due(self) -> bool:
        return self._clock() >= self._due

    def read_clock(self) -> float:
        return self._clock()

    def begin(self, at: float | None = None) -> None:
        """Begin an evaluation, or say when one has begun."""
        self._due = (self._clock() if at is None else at) + self._throttle


class Publisher:
    """Runs exporters over evaluations, and remembers what they have published."""

    def __init__(self, spec: EvalSpec, folder: Path | None) -> None:
        self.exporters = spec.all_exporters
        self._input_fn = spec.input_fn
        self._folder = folder
        #: The files, in the order of their publication.
        self.published: list[Path] = []
        if self.exporters and folder is None:
            raise InputError(
                "Exporters write to a folder of this machine. Received: a RunConfig whose model_dir is a URL."
                " Give a path, or leave the exporters out"
            )

    def export(self, model: Any, step: int, scores: Any, *, is_final: bool) -> None:
        """Have each exporter publish `model` if it is its turn. Training continues where one can't."""
        if not self.exporters or self._folder is None:
            return
        example = find_inputs(self._input_fn())
        # Of an estimator, what predicts.
        if hasattr(model, "served_model"):
            model = model.served_model
            example = pick_inputs(model, example)
        for exporter in self.exporters:
            try:
                path = exporter.export(model, self._folder, step, scores, example, is_final=is_final)
            except InsituError as error:
                _LOG.error("The exporter %r published nothing: %s", exporter.name, error)
                continue
            if path is not None:
                self.published.append(path)
                sys.stdout.write(f"[insitu] published {path}\n")
                sys.stdout.flush()


def find_inputs(data: Any) -> Any:
    """Return the inputs of the first batch of `data`."""
    if isinstance(data, keras.utils.PyDataset):
        data = data[0]
    elif isinstance(data, tuple):
        data = keras.tree.map_structure(lambda rows: rows[:BATCH_SIZE], data)
    else:
        data = next(iter(data))
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return x


class SpecEvaluator(SidecarEvaluator):
    """The evaluator task of `train_and_evaluate`. In a job it scores the checkpoints of one training, until
    the chief says that this one is over."""

    def __init__(
        self, model: Any, spec: EvalSpec, directory: Any, publisher: Publisher, number: int = 0
    ) -> None:
        data = check_data("an evaluation", spec.input_fn())
        super().__init__(model, data, directory, count_steps(data, spec.steps), None, list(spec.hooks))
        #: Number of the training in its script.
        self._number = number
        #: What the chief has said of it.
        self._training: Training | None = None
        self._pace = Pace(spec)
        self._publisher = publisher
        #: When the checkpoint under way was begun to be scored, by the clock of `_pace`.
        self._began = 0.0
        #: The position of the checkpoint that was scored last.
        self._position: tuple[int, int] | None = None
        self._is_exported = False
        self._spec_name = spec.name
        if number and self._log_dir is not None:
            self._log_dir = f"{self._log_dir}/training-{number + 1}"
        if spec.name is not None and self._log_dir is not None:
            self._log_dir = f"{self._log_dir}/eval_{spec.name}"
        if publisher.exporters and self._context.job is not None:
            # An incarnation before may have ended between a score and its export.
            for last in read_evaluations(self._context.job.evaluations)[-1:]:
                self._done.discard(last.identity)

    def _identify(self, candidate: Candidate) -> str:
        return name_evaluation(self._number, candidate.name)

    def _name(self, candidate: Candidate, loaded: Loaded) -> tuple[str, tuple[int, int] | None]:
        name, position = super()._name(candidate, loaded)
        return describe_evaluation(self._number, self._spec_name, name), position

    @property
    def scores(self) -> dict[str, float] | None:
        """The newest scores, with their global step; None before."""
        if not self.evaluations:
            return None
        newest = self.evaluations[-1]
        return {**newest.metrics, "global_step": newest.iterations or 0}

    def _find(self) -> Sequence[Candidate]:
        """Return the checkpoints of this training: others may write to the same folder, before and after."""
        found, training = self._source.find(), self._training
        if training is None:  # outside a job, or it never began in this one
            return found if self._context.job is None or self._training_over else ()
        last = training.last if training.is_over else None
        return [
            each
            for each in found
            if each.fit == training.fit and (last is None or each.position is None or each.position <= last)
        ]

    def _is_training_over(self) -> bool:
        # In this order: when the job is over, all is known of its trainings.
        is_job_over, job = super()._is_training_over(), self._context.job
        if job is None:
            return is_job_over
        self._training = found = find_training(job.trainings, self._number)
        return is_job_over or (found is not None and found.is_over and self._has_last(found))

    def _has_last(self, training: Training) -> bool:
        """Return whether a training's last checkpoint is here, or was. On another host it may be on its
        way."""
        positions = [each.position or (0, 0) for each in self._source.find() if each.fit == training.fit]
        return training.last is None or any(position >= training.last for position in positions)

    def _is_due(self) -> bool:
        return self._pace.is_due()

    def _score(self, candidate: Candidate) -> bool:
        self._position = candidate.position
        self._began = self._pace.read_clock()
        return super()._score(candidate)

    def _publish(self, evaluation: Evaluation) -> None:
        # Now: a checkpoint that couldn't be read is tried again at once.
        self._pace.begin(self._began)
        super()._publish(evaluation)
        self._export(evaluation, is_final=self._training_over)

    def _end(self) -> None:
        super()._end()
        last = self._training.last if self._training is not None else None
        if last is not None and last not in (self._position, *(each.position for each in self._find())):
            _LOG.warning(
                "The last checkpoint of training %d wasn't scored: the next one, which saves to the same "
                "folder, has removed it. Pass a larger keep_checkpoint_max, or a model_dir for each",
                self._number + 1,
            )
        if self.evaluations and not self._is_exported:
            self._export(self.evaluations[-1], is_final=True)

    def _export(self, evaluation: Evaluation, *, is_final: bool) -> None:
        self._is_exported = is_final
        self._publisher.export(self.model, evaluation.iterations or 0, evaluation.metrics, is_final=is_final)


def describe_evaluation(number: int, name: str | None, checkpoint: str) -> str:
    """Return how users know an evaluation: by its training, the name of its EvalSpec, and the checkpoint."""
    training = f"training {number + 1}" if number else None
    return ", ".join(part for part in (training, name, checkpoint) if part)


def name_evaluation(number: int, checkpoint: str) -> str:
    """Return what tells an evaluation from those of other trainings of its job, and other checkpoints."""
    return f"{number}/{checkpoint}"


def is_of_training(evaluation: Evaluation, number: int) -> bool:
    """Return whether an evaluation of the job is one of this training."""
    return evaluation.key.startswith(name_evaluation(number, ""))


class InTurnEvaluator(keras.callbacks.Callback):
    """Evaluates between the steps of a training, in all its tasks together, behind its checkpoints. On
    parameter servers the chief does, and the others train on.

    The chief's clock decides when. All tasks run it.
    """

    def __init__(self, spec: EvalSpec, publisher: Publisher, context: Context, number: int = 0) -> None:
        super().__init__()
        #: Number of the training in its script: another one has evaluations of its own.
        self._number = number
        self._spec = spec
        self._publisher = publisher
        self._context = context
        self._pace = Pace(spec)
        self.found: list[Evaluation] = []
        """Those of this process, oldest first; empty but in the chief."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model.stop_training:
            return  # the last evaluation follows the training
        trainer = trainer_of(self.model)
        wanted = self._context.is_chief and self._pace.is_due() and self._has_new_weights()
        if trainer is not None and agree(trainer, wanted):
            self.evaluate(self.model)

    def _has_new_weights(self) -> bool:
        """Return whether a step was done since the last evaluation: data may end where an epoch begins."""
        return not self.found or read_global_step(self.model) != self.found[-1].iterations

    def evaluate(self, model: Any, *, is_final: bool = False) -> dict[str, float]:
        """Return the scores of `model` as it is. Collective; on parameter servers the chief alone evaluates,
        and the others return none."""
        if find_servers(model) is not None and not self._context.is_chief:
            return {}
        began = time.monotonic()
        self._pace.begin()
        scores = evaluate_model(model, self._spec)
        if self._context.is_chief:
            step = read_global_step(model)
            self._note(step, scores, time.monotonic() - began)
            self._publisher.export(model, step, scores, is_final=is_final)
        return scores

    def _note(self, step: int, scores: dict[str, float], seconds: float) -> None:
        number = self._number if self._context.job is not None else 0
        name = describe_evaluation(number, self._spec.name, f"step {step}")
        key = name_evaluation(self._number, f"{step}")
        evaluation = Evaluation(name, None, None, step, scores, time.time(), seconds, key)
        self.found.append(evaluation)
        job = self._context.job
        if job is not None and evaluation.identity not in {
            each.identity for each in read_evaluations(job.evaluations)
        }:
            append_evaluation(job.evaluations, evaluation)
        sys.stdout.write(f"[insitu] evaluation of {evaluation.describe()}\n")
        sys.stdout.flush()


def evaluate_model(model: Any, spec: EvalSpec) -> dict[str, float]:
    """Return the scores of `model` as it is. Collective; on parameter servers of this worker alone, which
    reads all rows."""
    data = check_data("an evaluation", spec.input_fn())
    if find_servers(model) is not None:
        data = _take_all_rows(data)
    with expect_ends():
        found = model.evaluate(
            **name_parts(data),
            batch_size=BATCH_SIZE if isinstance(data, tuple) else None,
            steps=count_steps(data, spec.steps),
            callbacks=list(spec.hooks),
            verbose=0,
            return_dict=True,
        )
    return {name: float(value) for name, value in found.items()}


def _take_all_rows(data: Any) -> Any:
    """Return the data for a worker that evaluates alone. Raises InputError for a part of the rows."""
    if isinstance(data, Dataset):
        return data.all_shards()
    held, total = find_shards_of(data) or (1, 1)
    if held < total:
        raise InputError(
            f"On parameter servers the chief evaluates in turn alone, on all rows. Received: as_tf_dataset() "
            f"with the rows of {held} of {total} shards. Return the insitu.dataset itself from "
            f"EvalSpec.input_fn, or start the job with --evaluator"
        )
    return data


def name_parts(data: Any) -> dict[str, Any]:
    """Return the data of an input_fn as the arguments of `fit` and `evaluate`."""
    parts = data if isinstance(data, tuple) else (data,)
    return dict(zip(("x", "y", "sample_weight"), parts, strict=False))


def count_steps(data: Any, steps: int | None) -> int | None:
    """Return the number of batches to evaluate on: at most those that arrays have."""
    if steps is None or not isinstance(data, tuple):
        return steps
    rows = len(keras.tree.flatten(data)[0])
    if steps * BATCH_SIZE < rows:
        _tell_of_fewer_rows(steps, rows)
    return min(steps, math.ceil(rows / BATCH_SIZE))


@functools.cache
def _tell_of_fewer_rows(steps: int, rows: int) -> None:
    _LOG.warning(
        "Evaluations are on the first %d of %d rows: steps=%d batches of %d. With steps=None they are on all",
        steps * BATCH_SIZE,
        rows,
        steps,
        BATCH_SIZE,
    )
