"""Reads what the tasks of a job have measured: rates, curves, and uses of time. Asks no process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from insitu.base.measure.task_samples import Sample, read_last_samples, read_samples
from insitu.base.measure.time_account import CHECKPOINT, EVALUATION, IMPORT, RECOVERY, SCRIPT
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cluster.client.status import JobStatus, read_status
from insitu.cluster.decide import (
    PRODUCTIVE,
    Loss,
    TaskAccount,
    account_for_tasks,
    average,
    find_absences,
    find_lives,
    find_losses,
)
from insitu.cluster.job_files import Journal, read_copies

_WINDOW = 10.0
"""Seconds of training that rates are a mean over."""
_BESIDE_STEPS = (IMPORT, SCRIPT, EVALUATION, CHECKPOINT, RECOVERY)
"""Activities that are no part of a step."""
_TRAINING_ROLES = ("chief", "worker")


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a task is, over its last seconds of training without evaluations and checkpoints, and what it
    uses."""

    #: When it was measured last, in seconds since 1970.
    at: float
    #: Rows a second that the task fed to the model; None before its second sample.
    rows_per_second: float | None
    #: Seconds of a step; None before its second sample.
    step_seconds: float | None
    #: Those by activity (`insitu.base.measure.time_account`).
    split: Mapping[str, float]
    #: Processor cores that it used in its last seconds, also beside training.
    cpu: float
    #: Bytes of physical memory.
    memory: int
    #: The GPUs that it sees, as `insitu.train.elastic.progress_reporter` reads them.
    gpus: Sequence[Mapping[str, float]]


def read_rates(job: JobPaths, task: TaskId) -> Rates | None:
    """Return the rates of a task, or None if it has measured nothing."""
    samples = read_last_samples(job.samples(task))
    return compute_rates(samples) if samples else None


def compute_rates(samples: Sequence[Sample]) -> Rates:
    """Return the rates out of the last samples of a task, of which there is at least one. Pure."""
    last = samples[-1]
    own = [sample for sample in samples if sample.attempt == last.attempt]
    # Behind the last step a task may evaluate, or end: that isn't what a step takes.
    end = next((i for i, s in enumerate(own) if s.steps == last.steps), len(own) - 1)
    begin = max(0, end - 1)
    while begin > 0 and own[begin - 1].steps and own[end].at - own[begin - 1].at <= _WINDOW:
        begin -= 1
    a, b = own[begin], own[end]
    span, steps = b.at - a.at, b.steps - a.steps
    is_known = span > 0 and steps > 0 and a.steps > 0
    split = {name: value - a.seconds.get(name, 0.0) for name, value in b.seconds.items()}
    training = max(span - sum(max(0.0, split.pop(name, 0.0)) for name in _BESIDE_STEPS), 1e-9)
    return Rates(
        at=last.at,
        rows_per_second=(b.rows - a.rows) / training if is_known else None,
        step_seconds=training / steps if is_known else None,
        split={name: value / steps for name, value in split.items() if value > 0} if is_known else {},
        cpu=_compute_cpu(own),
        memory=last.memory,
        gpus=last.gpus,
    )


def _compute_cpu(samples: Sequence[Sample]) -> float:
    """Return the cores that a process used in its last seconds, whatever it did, such as to evaluate. For one
    sample, those of all its life."""
    last = samples[-1]
    first = next((each for each in samples if last.at - each.at <= _WINDOW), last)
    if last.at > first.at:
        return (last.cpu - first.cpu) / (last.at - first.at)
    return last.cpu / max(last.at - last.started, 1e-3)


def find_newest(samples: Iterable[Sample]) -> Sample | None:
    """Return the sample that the training has come furthest with, one with logs if there is any. Pure."""
    found = list(samples)
    logged = [sample for sample in found if sample.metrics]

    def rank(each: Sample) -> tuple[int, int, int, float]:
        # At the end of an epoch the logs are those of its validation, too.
        return each.call, each.updates or 0, len(each.metrics), each.at

    return max(logged or found, key=rank, default=None)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The logs of a training at one time."""

    #: Number of the script's call of `fit`, from 0.
    call: int
    #: Updates that its model had had.
    updates: int
    #: When, in seconds since 1970.
    at: float
    #: The epoch, from 0.
    epoch: int
    #: The step that came next in it, from 0.
    step: int
    #: As Keras shows them, by name; those of a validation at an epoch's end.
    metrics: Mapping[str, float] = field(default_factory=dict)


def read_curve(job: JobPaths) -> list[CurvePoint]:
    """Return the curve of a job's training, by (call, updates)."""
    tasks = [each.task for each in Journal(job.journal).state().tasks if each.task.role in _TRAINING_ROLES]
    return join_curves(make_curve(read_samples(job.samples(task))) for task in sorted(tasks))


def make_curve(samples: Iterable[Sample]) -> list[CurvePoint]:
    """Return the curve out of one task's samples. Steps that were done again replace the first ones. Pure."""
    points: list[CurvePoint] = []
    for sample in samples:
        if sample.updates is None or not sample.metrics:
            continue
        metrics = dict(sample.metrics)
        while points and (points[-1].call, points[-1].updates) >= (sample.call, sample.updates):
            before = points.pop()
            if (before.call, before.updates, before.epoch) == (sample.call, sample.updates, sample.epoch):
                # The logs at an epoch's end have more than those of its last step.
                metrics = {**before.metrics, **metrics}
        points.append(CurvePoint(sample.call, sample.updates, sample.at, sample.epoch, sample.step, metrics))
    return points


def join_curves(curves: Iterable[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """Return the first curve, continued by the others after its end. In a synchronous training all tasks see
    the same. Pure."""
    joined: list[CurvePoint] = []
    for curve in curves:
        end = (joined[-1].call, joined[-1].updates) if joined else (-1, -1)
        joined += [point for point in curve if (point.call, point.updates) > end]
    return joined


@dataclass(frozen=True, slots=True)
class Goodput:
    """The uses of a job's time."""

    #: Seconds from its creation to its end, or until now.
    wall: float
    #: The share of them that trained the model, in [0, 1].
    goodput: float
    #: Seconds by activity, as a mean over tasks; they add up to `wall`.
    seconds: Mapping[str, float]
    #: The account of each task that trains.
    tasks: Sequence[TaskAccount]
    #: Those of parameter servers and the evaluator, which aren't part of the mean.
    other_tasks: Sequence[TaskAccount]
    #: The largest losses.
    losses: Sequence[Loss]

    def to_json(self) -> dict[str, Any]:
        """Return what `describe --goodput --json` prints."""
        return {
            "wall": self.wall,
            "goodput": self.goodput,
            "seconds": dict(self.seconds),
            "tasks": [_to_json(account) for account in self.tasks],
            "other_tasks": [_to_json(account) for account in self.other_tasks],
            "losses": [asdict(loss) for loss in self.losses],
        }


def _to_json(account: TaskAccount) -> dict[str, Any]:
    segments = [asdict(segment) for segment in account.segments]
    return {"task": account.task, "seconds": account.seconds, "segments": segments}


def measure_goodput(job: JobPaths, status: JobStatus | None = None) -> Goodput:
    """Return the uses of a job's time until now. Raises ClusterError if its folder can't be read."""
    status = status or read_status(job)
    state, created = status.state, status.spec.created
    until = time.time() if status.ended is None else status.ended
    tasks = [each for each in state.tasks if each.task.role in _TRAINING_ROLES]
    others = [each for each in state.tasks if each.task.role not in _TRAINING_ROLES]
    samples = {str(each.task): read_samples(job.samples(each.task)) for each in tasks}
    entries = [(entry.at, entry.event) for entry in Journal(job.journal).entries()]
    wall = max(0.0, until - created)
    lives, absences, copies = find_lives(entries), find_absences(entries), read_copies(job)
    accounts = account_for_tasks(created, created + wall, lives, samples, absences, copies)
    beside = {str(each.task): read_samples(job.samples(each.task)) for each in others}
    other_accounts = account_for_tasks(created, created + wall, lives, beside, absences, copies, trains=False)
    seconds = average(accounts) if accounts else {}
    productive = sum(seconds.get(name, 0.0) for name in PRODUCTIVE)
    nodes = {str(each.task): each.node for each in tasks}
    losses = find_losses(seconds, wall, samples, nodes)
    return Goodput(wall, productive / wall if wall else 0.0, seconds, accounts, other_accounts, losses)


def summarize_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON, which has no infinite numbers, nor such that are none."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
