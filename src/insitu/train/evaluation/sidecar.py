"""Scores the checkpoints of a training that runs in other processes."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.base.evaluations import Evaluation, append_evaluation, read_evaluations
from insitu.base.measure.time_account import ACCOUNT, EVALUATION, WAIT
from insitu.base.roster import read_roster
from insitu.train.checkpoint import checkpoint_key
from insitu.train.elastic import SideSampler
from insitu.train.evaluation.checkpoints import (
    AnyCheckpoints,
    Candidate,
    Loaded,
    choose_next,
    name_checkpoint,
)
from insitu.train.evaluation.event_files import EventFile, is_url
from insitu.train.parameter_server import embeddings_of

BATCH_SIZE = 32
"""Rows of a batch of arrays, as in `evaluate`."""
_TRIES = 3
"""How often a checkpoint is read that isn't whole."""
_LOG = logging.getLogger("insitu")


class SidecarEvaluator:
    """Evaluates a model with the weights of each checkpoint that a training writes, beside that training.

    For the evaluator task of a job (`insitu start --evaluator`), or any process that sees the folder. It
    reads what `insitu.BackupAndRestore` writes, or the `.keras` files of Keras' `ModelCheckpoint`. The
    training never waits for it: it takes the newest checkpoint, and passes over those that came while it was
    busy. In a job the last one is always scored; the job then ends. Scores are printed, listed by `insitu
    describe`, and written as event files for TensorBoard.

    ```
    if insitu.context().role == "evaluator":
        insitu.SidecarEvaluator(model, held_out).start()
    else:
        model.fit(train, epochs=9, callbacks=[insitu.BackupAndRestore()])
    ```

    Args:
        model: the model that is trained, compiled with the loss and metrics to evaluate.
        data: the argument `x` of `model.evaluate`, or a tuple `(x, y)` or `(x, y, sample_weight)` of arrays.
            Read again for each checkpoint.
        checkpoint_dir: where the training saves; None: the folder of the job.
        steps: batches to evaluate on; None: all.
        max_evaluations: ends after so many; None: with the training. Outside a job that is known of
            `insitu.BackupAndRestore` only, at the end of a fit.
        callbacks: Keras callbacks for `evaluate`.
        fit: the number of the fit, from 0, whose checkpoints to score, for a script that fits several times;
            None: of all.
        log_dir: folder for event files; None: one in the job's folder, outside a job no event files.
        poll_seconds: how often to look for a new checkpoint.

    Raises:
        TrainingError: for a model that isn't compiled, or has its tables on parameter servers; for data that
            can be read once; without `checkpoint_dir` outside a job.

    Example:
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        >>> model.compile("adam", "mse")
        >>> evaluator = insitu.SidecarEvaluator(model, (np.zeros((8, 64)), np.zeros((8, 10))), "backups")
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | Path | None = None,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Any = None,
        *,
        fit: int | None = None,
        log_dir: str | Path | None = None,
        poll_seconds: float = 1.0,
    ) -> None:
        context = read_context()
        directory = checkpoint_dir or context.checkpoint_dir
        _check(model, data, directory, max_evaluations)
        self.model = model
        self.data = data
        self.steps = steps
        self.callbacks = callbacks
        self.max_evaluations = max_evaluations
        self.evaluations: list[Evaluation] = []
        """Those of this process, oldest first."""
        self._context = context
        key = None if checkpoint_dir or context.job is None else checkpoint_key(context)
        self._directory = directory
        self._source = AnyCheckpoints(directory or "", key, fit)
        self._log_dir = _choose_log_dir(context, log_dir)
        self._events: EventFile | None = None
        self._poll_seconds = poll_seconds
        self._sampler = SideSampler(context)
        #: Names of the checkpoints that were scored, also by this task's incarnations before.
        self._done = {each.identity for each in _read_before(context)}
        #: How often each checkpoint could not be read.
        self._failures: Counter[str] = Counter()
        #: Whether the training was known to be over when checkpoints were last listed.
        self._training_over = False

    def start(self, wait: Callable[[float], None] = time.sleep) -> None:
        """Score checkpoints until the training is over and its last one is scored, or `max_evaluations` are
        made. `wait` is called with the seconds until the next look."""
        with ACCOUNT.hold(WAIT):
            self._watch(wait)
        self._sampler.write(now=True)

    def _watch(self, wait: Callable[[float], None]) -> None:
        while True:
            # In this order: what is published before training ends is listed.
            self._training_over = self._training_over or self._is_training_over()
            self._sampler.write()
            candidate = self._choose()
            if candidate is not None and (self._training_over or self._is_due()):
                if self._score(candidate):
                    return
                if self._failures[candidate.name]:
                    wait(self._poll_seconds)
            elif self._training_over:
                self._end()
                return  # the weights of the last checkpoint stay in the model
            else:
                wait(self._poll_seconds)

    def _choose(self) -> Candidate | None:
        """Return the checkpoint to score next, or None."""
        found = self._find()
        done = {each.name for each in found if self._identify(each) in self._done}
        return choose_next(found, done, self._find_unreadable())

    def _find(self) -> Sequence[Candidate]:
        """Return the checkpoints of the training, oldest first."""
        return self._source.find()

    def _identify(self, candidate: Candidate) -> str:
        """Return a key that distinguishes a checkpoint from others of the job."""
        return candidate.name

    def _is_training_over(self) -> bool:
        """Return whether the job's controller says so. Outside a job nobody does."""
        job = self._context.job
        roster = read_roster(job.roster) if job is not None else None
        return roster is not None and roster.training_over

    def _is_due(self) -> bool:
        """Return whether a checkpoint may be scored now, while training continues."""
        return True

    def _find_unreadable(self) -> set[str]:
        return {name for name, count in self._failures.items() if count >= _TRIES}

    def _score(self, candidate: Candidate) -> bool:
        """Evaluate with the weights of one checkpoint. Returns True if that was the last one to score."""
        with ACCOUNT.hold(EVALUATION):
            self._sampler.write(now=True)  # it may take long, and the process may be killed in it
            return self._score_now(candidate)

    def _score_now(self, candidate: Candidate) -> bool:
        began = time.monotonic()
        self._build()
        loaded = self._source.load(candidate, self.model)
        if loaded is None:
            self._failures[candidate.name] += 1
            return False
        scores = self._evaluate()
        name, position = self._name(candidate, loaded)
        epoch, step = position or (None, None)
        evaluation = Evaluation(
            checkpoint=name,
            epoch=epoch,
            step=step,
            iterations=loaded.iterations,
            metrics=scores,
            at=time.time(),
            seconds=time.monotonic() - began,
            key=self._identify(candidate),
        )
        self._publish(evaluation)
        return self._is_last(loaded)

    def _name(self, candidate: Candidate, loaded: Loaded) -> tuple[str, tuple[int, int] | None]:
        """Return how users know a checkpoint, and where its training was."""
        return name_checkpoint(candidate, loaded)

    def _build(self) -> None:
        if not self.model.built:
            self._evaluate(steps=1)

    def _evaluate(self, steps: int | None = None) -> dict[str, float]:
        parts = self.data if isinstance(self.data, tuple) else (self.data,)
        with expect_ends():
            scores = self.model.evaluate(
                **dict(zip(("x", "y", "sample_weight"), parts, strict=False)),
                # Given a number of steps alone, Keras would cut arrays into so many batches.
                batch_size=BATCH_SIZE if isinstance(self.data, tuple) else None,
                steps=steps or self.steps,
                callbacks=None if steps else self.callbacks,
                verbose=0,
                return_dict=True,
            )
        return {name: float(value) for name, value in scores.items()}

    def _publish(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        self._done.add(evaluation.identity)
        if self._context.job is not None:
            append_evaluation(self._context.job.evaluations, evaluation)
        if self._log_dir is not None:
            self._events = self._events or EventFile(self._log_dir)
            number = len(self.evaluations) if evaluation.iterations is None else evaluation.iterations
            self._events.write(
                number,
                {f"evaluation_{name}_vs_iterations": value for name, value in evaluation.metrics.items()},
            )
        sys.stdout.write(f"[insitu] evaluation of {evaluation.describe()}\n")
        sys.stdout.flush()

    def _is_last(self, loaded: Loaded) -> bool:
        if self.max_evaluations is not None and len(self.evaluations) >= self.max_evaluations:
            return True
        return loaded.is_final and self._context.job is None

    def _end(self) -> None:
        if not self._done:
            _LOG.warning(
                "No checkpoint was scored: the training wrote none to %s that could be read. Pass "
                "insitu.BackupAndRestore() to fit.",
                self._directory,
            )


@contextlib.contextmanager
def expect_ends() -> Iterator[None]:
    """While open, Keras doesn't warn if data has fewer batches than were asked for: it is read again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def _read_before(context: Context) -> list[Evaluation]:
    return read_evaluations(context.job.evaluations) if context.job is not None else []


def _choose_log_dir(context: Context, log_dir: str | Path | None) -> Path | str | None:
    if log_dir is not None:
        return log_dir if is_url(log_dir) else Path(log_dir)
    return context.job.summaries(context.task) if context.job is not None else None


def _check(model: Any, data: Any, directory: str | Path | None, max_evaluations: int | None) -> None:
    """Raise TrainingError for arguments of SidecarEvaluator that can't be."""
    if not model.compiled:
        raise TrainingError(
            "The evaluator's model is compiled with the loss and the metrics to evaluate. Received: "
            f"{model.name!r}, which isn't compiled. Call compile as for the training."
        )
    if isinstance(data, types.GeneratorType):
        raise TrainingError(
            "The evaluator reads its data again for each checkpoint. Received: a generator, which ends once. "
            "Pass arrays, an insitu.Dataset, a tf.data.Dataset, a keras.utils.PyDataset or a DataLoader."
        )
    if directory is None:
        raise TrainingError(
            "The evaluator reads a folder of checkpoints. Received: no checkpoint_dir, outside a job. Pass "
            "the directory that BackupAndRestore or ModelCheckpoint was given."
        )
    if max_evaluations is not None and max_evaluations < 1:
        raise TrainingError(f"max_evaluations is a number above 0, or None. Received: {max_evaluations}")
    if tables := [layer.name for layer in embeddings_of(model)]:
        raise TrainingError(
            "The evaluator has no parameter servers, so a model with tables on them can't be scored there. "
            f"Received: {model.name!r} with the insitu.layers.Embedding {', '.join(tables)}. Leave "
            "--evaluator out, and score it by fit(validation_data=...)."
        )
