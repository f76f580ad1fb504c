"""Hooks that end a training by the scores of its evaluations: the evaluator's, or those made in turn.

The chief looks at each checkpoint, and all workers end at the same step. On parameter servers that don't wait
for all workers, the others end as soon as they know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError
from insitu.base.evaluations import Evaluation
from insitu.base.tf_signatures import takes_old
from insitu.exchange import Group
from insitu.extensions.estimator.hooks import is_chief
from insitu.extensions.estimator.server_training import end_for_all, find_servers
from insitu.train.collectives import squeeze_shards
from insitu.train.elastic import CALL
from insitu.train.fit import KerasTrainer, trainer_of
from insitu.train.strategies import ParameterServerStrategy

Scored = tuple[int, float]
"""Updates of the model, and a score that it had then."""
Rule = Callable[[Sequence[Scored]], bool]
"""Takes the scores, oldest first; returns whether to end."""


class StopIfHook(keras.callbacks.Callback):
    """Ends the training where a rule over the scores says so. Made by the functions below."""

    def __init__(self, metric_name: str, rule: Rule, min_steps: int) -> None:
        super().__init__()
        if not isinstance(metric_name, str):
            raise InputError(
                "Training ends by the name of a metric, such as 'loss'. Received: "
                f"{type(metric_name).__name__}. An estimator isn't passed here"
            )
        self._metric = metric_name
        self._rule = rule
        self._min_steps = min_steps
        self._read: Callable[[], Sequence[Evaluation]] | None = None

    def watch(self, read: Callable[[], Sequence[Evaluation]]) -> None:
        """Take the evaluations from `read`. Called by `train_and_evaluate`."""
        self._read = read

    def on_train_begin(self, logs: Any = None) -> None:
        if self._read is None:
            raise InputError(
                "This hook reads the evaluations of train_and_evaluate. Received: a fit without. Pass it in "
                "TrainSpec.hooks; for fit there is keras.callbacks.EarlyStopping"
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        trainer, servers = trainer_of(self.model), find_servers(self.model)
        if trainer is None or not agree(trainer, is_chief(self.model) and self._wants_end()):
            return
        if servers is None or end_for_all(servers):
            self.model.stop_training = True

    def _wants_end(self) -> bool:
        found = self._read() if self._read is not None else ()
        return self._rule(find_scores(found, self._metric, self._min_steps))


def find_scores(found: Sequence[Evaluation], metric: str, min_steps: int) -> list[Scored]:
    """Return the scores by one metric from `min_steps` updates on. Raises InputError if there is none of
    that name."""
    scores = []
    for evaluation in found:
        if metric not in evaluation.metrics:
            raise InputError(
                f"Training ends by a metric of its evaluations: {', '.join(evaluation.metrics)}. Received: "
                f"{metric!r}"
            )
        if evaluation.iterations is not None and evaluation.iterations >= min_steps:
            scores.append((evaluation.iterations, evaluation.metrics[metric]))
    return scores


_OLD = {
    "estimator": "Leave it out: the hook reads the scores of the training that it is given to",
    "eval_dir": "Leave it out: the hook reads the scores of the training that it is given to",
    "run_every_secs": "Leave it out: the chief looks at each checkpoint",
    "run_every_steps": "Leave it out: the chief looks at each checkpoint",
}


@takes_old(**_OLD)
def stop_if_higher_hook(metric_name: str, threshold: float, *, min_steps: int = 0) -> StopIfHook:
    """Return a hook that ends the training once a score is above `threshold`."""
    return StopIfHook(metric_name, lambda scores: any(s > threshold for _, s in scores), min_steps)


@takes_old(**_OLD)
def stop_if_lower_hook(metric_name: str, threshold: float, *, min_steps: int = 0) -> StopIfHook:
    """Return a hook that ends the training once a score is below `threshold`."""
    return StopIfHook(metric_name, lambda scores: any(s < threshold for _, s in scores), min_steps)


@takes_old(**_OLD)
def stop_if_no_decrease_hook(
    metric_name: str, max_steps_without_decrease: int, *, min_steps: int = 0
) -> StopIfHook:
    """Return a hook that ends the training once a score hasn't become less for so many steps."""
    return StopIfHook(
        metric_name, lambda scores: has_stagnated(scores, max_steps_without_decrease), min_steps
    )


@takes_old(**_OLD)
def stop_if_no_increase_hook(
    metric_name: str, max_steps_without_increase: int, *, min_steps: int = 0
) -> StopIfHook:
    """Return a hook that ends the training once a score hasn't become more for so many steps."""

    def rule(scores: Sequence[Scored]) -> bool:
        return has_stagnated([(step, -score) for step, score in scores], max_steps_without_increase)

    return StopIfHook(metric_name, rule, min_steps)


def has_stagnated(scores: Sequence[Scored], max_steps: int) -> bool:
    """Return whether the least score is `max_steps` updates old or older at some evaluation. What is no
    number is never the least."""
    best: Scored | None = None
    for step, score in scores:
        if best is None or score < best[1] or best[1] != best[1]:
            best = (step, score)
        elif step - best[0] >= max_steps:
            return True
    return False


# Has all tasks of a training do what one of them wants, at the same step


def agree(trainer: KerasTrainer, wanted: bool) -> bool:
    """Return, in each task, whether one of them wants something. Collective, in the middle of a fit. On
    parameter servers each task does what it wants itself."""
    membership = trainer.membership
    if isinstance(trainer.strategy, ParameterServerStrategy):
        return wanted  # workers on servers don't wait for each other
    if len(membership.context.workers) <= 1:
        return wanted

    def ask() -> bool:
        def work(group: Group) -> NDArray[Any]:
            return squeeze_shards(np.full((len(group.shards), 1), float(wanted)))

        rows = membership.lockstep.run_unit_until_done(trainer.calls.position(CALL), work)
        # No rows: this task takes another's place, and the others have passed here.
        return bool(rows.any())

    return bool(membership.run_call(trainer, ask))
