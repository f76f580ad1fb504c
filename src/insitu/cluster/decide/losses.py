"""Says in words how a job's time was spent, and how to lose less. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.base.measure.task_samples import Sample
from insitu.base.measure.time_account import (
    CALLBACKS,
    CHECKPOINT,
    COMPILE,
    DATA,
    EVALUATION,
    EXCHANGE,
    GRADIENT,
    IMPORT,
    RECOVERY,
    SCRIPT,
    WAIT,
)
from insitu.cluster.decide.goodput import AWAY, COPYING, IDLE, PRODUCTIVE, QUEUEING, REDONE

MOST = 5
"""Losses that are listed."""
_LEAST_SHARE = 0.005
"""Share of the job's time: smaller ones are left out."""
_NOTABLE = 0.1
"""A task that takes longer than the others by this share, or more, is named."""

_TEXTS = {
    QUEUEING: (
        "the job waited for its tasks to be started",
        "Look at controller.log in the job's folder where this is more than a second",
    ),
    COPYING: (
        "partitions moved to the hosts whose tasks read them",
        "Run tasks where the partitions are: --node of insitu start, or as many workers as nodes own data; "
        "or move copies beforehand: insitu rebalance",
    ),
    IMPORT: (
        "tasks loaded libraries",
        "Import what the script needs at its top, and nothing else; longer trainings spread the cost",
    ),
    SCRIPT: (
        "the script's own code ran, outside of fit and evaluate",
        "Prepare data once, by insitu import, not in each task",
    ),
    COMPILE: (
        "steps were built and compiled",
        "Let all batches have one shape, and compile the model once",
    ),
    DATA: (
        "tasks waited for rows",
        "Store rows as the model takes them, so that map and filter have less to do; see "
        "docs/how-to/compress.md and docs/explanations/large-data.md",
    ),
    EXCHANGE: (
        "gradients moved between tasks",
        "Make batches larger, or send gradients in fewer bytes: compression= of the strategy "
        "(docs/explanations/exchange.md)",
    ),
    WAIT: ("tasks waited for the slowest", "Give each task as much processor and data as the others"),
    CALLBACKS: (
        "callbacks and Keras' loop ran",
        "Leave out callbacks that hear of each batch, print with verbose=2, or compile with "
        "steps_per_execution",
    ),
    EVALUATION: (
        "the model was evaluated",
        "Score checkpoints beside the training: insitu start --evaluator; or set validation_freq",
    ),
    CHECKPOINT: ("checkpoints were saved and read", "Save less often: save_freq of insitu.BackupAndRestore"),
    RECOVERY: (
        "tasks that were lost were noticed and started again",
        "Keep a process that stands by: insitu start --standby 1; find out why tasks end: insitu logs",
    ),
    REDONE: (
        "steps were done again that were lost with all tasks",
        "Save more often: save_freq of insitu.BackupAndRestore",
    ),
    IDLE: (
        "tasks didn't run while the job did",
        "Give tasks as many rows as each other, or start fewer of them",
    ),
    AWAY: (
        "the job was over until a user had it continue",
        "Find out why it ended: insitu describe. After that insitu resume continues at once",
    ),
}


@dataclass(frozen=True, slots=True)
class Loss:
    """One of the largest losses of a job."""

    #: The use of the time.
    activity: str
    #: Seconds, as a mean over tasks.
    seconds: float
    #: Their share of the job's time, in [0, 1].
    share: float
    #: The loss in words.
    text: str
    #: The advice.
    advice: str


def find_losses(
    seconds: Mapping[str, float],
    wall: float,
    samples: Mapping[str, Sequence[Sample]],
    nodes: Mapping[str, str | None],
) -> list[Loss]:
    """Return the largest losses, the largest first, out of the mean seconds by activity of a job that took
    `wall` seconds. `nodes` has the node of each task."""
    names = sorted((n for n in seconds if n not in PRODUCTIVE), key=lambda name: -seconds[name])
    found = []
    for name in names[:MOST]:
        share = seconds[name] / wall if wall else 0.0
        if share < _LEAST_SHARE:
            break
        what, advice = _TEXTS[name]
        more = _name_slowest(samples, nodes) if name == WAIT else ""
        text = f"{seconds[name]:.3g} s ({share:.1%}): {what}{more}"
        found.append(Loss(name, seconds[name], share, text, advice))
    return found


def _name_slowest(samples: Mapping[str, Sequence[Sample]], nodes: Mapping[str, str | None]) -> str:
    """Return who came last at the exchange, and who takes longer for a step than the others."""
    text = ""
    last = max((count_last(own) for own in samples.values()), key=Counter.total, default=Counter[str]())
    if last:
        task, count = last.most_common(1)[0]
        text = f"; {_locate(task, nodes)} came last in {count / last.total():.0%} of the steps"
    paces = {task: pace for task, own in samples.items() if (pace := measure_pace(own)) is not None}
    if len(paces) < 2:
        return text
    slowest = max(paces, key=lambda task: paces[task])
    median = statistics.median(pace for task, pace in paces.items() if task != slowest)
    if median and paces[slowest] / median - 1 >= _NOTABLE:
        text += (
            f"; {_locate(slowest, nodes)} is {paces[slowest] / median - 1:.0%} slower than the median of the "
            f"others: {1000 * paces[slowest]:.3g} ms for a step's rows and gradient, not {1000 * median:.3g}"
        )
    return text


def _locate(task: str, nodes: Mapping[str, str | None]) -> str:
    node = nodes.get(task)
    return f"{task} on {node}" if node else task


def count_last(samples: Sequence[Sample]) -> Counter[str]:
    """Return how often each task came last at the exchange, as one task saw it through all incarnations."""
    total: Counter[str] = Counter()
    for sample in _final(samples):
        total.update(sample.last)
    return total


def measure_pace(samples: Sequence[Sample]) -> float | None:
    """Return the seconds that a task took for the rows and the gradient of a step; None without steps."""
    final = _final(samples)
    steps = sum(sample.steps for sample in final)
    seconds = sum(sample.seconds.get(name, 0.0) for sample in final for name in (DATA, GRADIENT))
    return seconds / steps if steps else None


def _final(samples: Sequence[Sample]) -> list[Sample]:
    """Return the last sample of each incarnation."""
    return list({sample.attempt: sample for sample in samples}.values())
