"""Accounts for every second of a job: how much of it trained the model, and what the rest was spent on. Pure.

The journal has the times when processes of a task lived, and when the job was over until a user resumed it.
Their activities are in their samples (`base/measure/task_samples.py`). So the account of each task covers the
whole time of the job, and adds up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from insitu.base.measure.task_samples import Sample
from insitu.base.measure.time_account import (
    ACTIVITIES,
    CALLBACKS,
    COMPILE,
    DATA,
    EXCHANGE,
    GRADIENT,
    IMPORT,
    RECOVERY,
    SCRIPT,
    UPDATE,
    WAIT,
    activity_of,
)

QUEUEING = "queueing"
COPYING = "copying"
REDONE = "redone"
IDLE = "idle"
AWAY = "away"
JOB_ACTIVITIES = (QUEUEING, COPYING, *ACTIVITIES, REDONE, IDLE, AWAY)
"""Activities of a second of a job: until tasks start; bringing partitions to the hosts that read them,
meanwhile; an activity of a task; steps that were done before, by processes whose work was lost; a task that
doesn't run while the job does; no job, until a user resumes it."""
PRODUCTIVE = (GRADIENT, UPDATE)
"""Activities that train the model."""
_MOST_SEGMENTS = 200
_LEAST = 1e-9
"""Seconds that nothing can be said of."""
_OF_STEPS = (COMPILE, DATA, GRADIENT, EXCHANGE, WAIT, UPDATE, CALLBACKS)
"""Activities of steps: if they were done before, that was in vain."""

Seconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a task, as the journal knows it. Times are in seconds since 1970."""

    #: When it was launched.
    launched: float
    #: When it ended; None while it runs.
    ended: float | None = None
    #: Its exit code; None while it runs, and if it ended with all others, the job's own included.
    code: int | None = None
    #: The task's incarnation.
    incarnation: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """Activities of a task from one time to another. Times are in seconds since the job was created."""

    #: When it begins.
    start: float
    #: When it ends.
    end: float
    #: Seconds by activity, which add up to its length.
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TaskAccount:
    """The account of one task."""

    #: Its name.
    task: str
    #: One behind the other, over the whole time of the job.
    segments: Sequence[Segment]

    @property
    def seconds(self) -> Seconds:
        """The seconds by activity, which add up to the time of the job."""
        return _add_up(segment.seconds for segment in self.segments)


def find_lives(entries: Iterable[tuple[float, Mapping[str, Any]]]) -> dict[str, list[Life]]:
    """Return the processes of each task, in order, from the entries of a journal: (time, event)."""
    lives: dict[str, list[Life]] = {}
    before = 0.0
    for at, event in _order(entries):
        match event.get("event"):
            case "Launched":
                _add_launches(lives, at, event)
            case "TaskExited":
                own = lives.get(event["task"], [])
                if own and own[-1].ended is None:
                    own[-1] = replace(
                        own[-1],
                        ended=at,
                        code=event["code"],
                        incarnation=event.get("attempt") or own[-1].incarnation,
                    )
            case "ControllerLost" | "Resumed" as name:
                # A job that resumes was over since the previous entry.
                _end_all(lives, before if name == "Resumed" else at)
        before = at
    return lives


def _add_launches(lives: dict[str, list[Life]], at: float, event: Mapping[str, Any]) -> None:
    """Begin the lives of the processes that were launched."""
    # Earlier versions didn't write down the incarnations: mostly each is the one after the last.
    known = event.get("attempts") or [None] * len(event["processes"])
    for (task, _), incarnation in zip(event["processes"], known, strict=True):
        own = lives.setdefault(task, [])
        last = own[-1] if own else None
        if last is not None and last.ended is None:
            # A controller that takes over repeats what the one before had launched.
            if incarnation in (None, last.incarnation):
                continue
            own[-1] = replace(last, ended=at)
        own.append(Life(at, incarnation=incarnation or (last.incarnation + 1 if last else 1)))


def _end_all(lives: Mapping[str, list[Life]], at: float) -> None:
    for own in lives.values():
        if own[-1].ended is None:
            own[-1] = replace(own[-1], ended=at)


def find_absences(entries: Iterable[tuple[float, Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """Return the spans (start, end) in which a job was over until a user resumed it, by its journal."""
    # Nothing is recorded of a job that is over.
    return [
        (ended, at)
        for (ended, _), (at, event) in pairwise(_order(entries))
        if event.get("event") == "Resumed"
    ]


def _order(
    entries: Iterable[tuple[float, Mapping[str, Any]]],
) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yield the entries so that no time goes back: clocks may have been set between two controllers."""
    latest = 0.0
    for at, event in entries:
        latest = max(latest, at)
        yield latest, event


def account_for_tasks(
    created: float,
    until: float,
    lives: Mapping[str, Sequence[Life]],
    samples: Mapping[str, Sequence[Sample]],
    absences: Sequence[tuple[float, float]] = (),
    copies: Sequence[tuple[float, float]] = (),
    *,
    trains: bool = True,
) -> list[TaskAccount]:
    """Return the account of each task in `samples` from `created` to `until`, in seconds since 1970.

    `absences` are the times from when to when the job was over, `copies` those in which partitions were
    brought to hosts. Tasks that don't train are as good as new with their first sample, others with their
    first step.
    """
    started = min((own[0].launched for own in lives.values() if own), default=until)
    done = [
        (each.at, (each.call, each.updates))
        for own in samples.values()
        for each in own
        if each.updates is not None
    ]
    accounts = []
    for task, own in samples.items():
        covered = _cover(created, until, started, lives.get(task, ()), own, done, absences, trains)
        pieces = [part for piece in covered for part in _cut(piece, QUEUEING, copies, COPYING)]
        segments = [Segment(a - created, b - created, seconds) for a, b, seconds in pieces if b > a]
        accounts.append(TaskAccount(task, _merge(segments, _MOST_SEGMENTS)))
    return accounts


CallUpdates = tuple[int, int]
"""The number of a call of `fit`, and the updates of its model."""
Piece = tuple[float, float, Seconds]
"""(start, end, seconds by activity)."""


def _cover(
    created: float,
    until: float,
    started: float,
    lives: Sequence[Life],
    samples: Sequence[Sample],
    done: Sequence[tuple[float, CallUpdates]],
    absences: Sequence[tuple[float, float]],
    trains: bool,
) -> Iterable[Piece]:
    """Yield what a task did, one piece behind the other, from `created` to `until`."""
    at = created
    for index, life in enumerate(lives):
        begin = min(max(life.launched, at), until)
        yield from _cover_gap(at, begin, started, absences, is_first=index == 0, is_last=False)
        end = until if life.ended is None else min(max(life.ended, begin), until)
        own = [each for each in samples if each.attempt == life.incarnation]
        best = max((reached for seen, reached in done if seen <= life.launched), default=None)
        later = index + 1 < len(lives)
        yield from _cover_life(
            life, begin, end, own, best if index else None, is_first=index == 0, later=later, trains=trains
        )
        at = end
    yield from _cover_gap(at, until, started, absences, is_first=not lives, is_last=True)


def _cover_gap(
    at: float,
    end: float,
    started: float,
    absences: Sequence[tuple[float, float]],
    *,
    is_first: bool,
    is_last: bool,
) -> Iterable[Piece]:
    """Yield what passed while no process of a task lived. `started` is when the job's first task did.

    A task that comes back is missed from its end on, or from when a user resumed the job. It isn't missed
    before that user came, nor is one that doesn't come back.
    """
    back = max((b for _, b in absences if at <= b <= end), default=at)
    if is_first:
        queued = min(max(started, at), end)
        pieces = [(at, queued, QUEUEING), (queued, end, IDLE)]
    elif is_last:
        pieces = [(at, end, IDLE)]
    else:
        pieces = [(at, back, IDLE), (back, end, RECOVERY)]
    for begin, stop, name in pieces:
        yield from _cut((begin, stop, {name: stop - begin}), name, absences, AWAY)


def _cover_life(
    life: Life,
    begin: float,
    end: float,
    samples: Sequence[Sample],
    best: CallUpdates | None,
    *,
    is_first: bool,
    later: bool,
    trains: bool,
) -> Iterable[Piece]:
    """Yield what one process did. Steps up to `best` had been done before it began."""
    at = begin
    before: Sample | None = None
    for sample in samples:
        stop = min(max(sample.at, at), end)
        known = before.seconds if before is not None else {}
        seconds = {name: max(0.0, value - known.get(name, 0.0)) for name, value in sample.seconds.items()}
        fitted = _fit(seconds, stop - at, IMPORT if before is None else None)
        if not is_first and (before is None or (trains and not before.steps)):
            # A process's time until its first step is the price of the loss of the previous one.
            fitted = {RECOVERY: stop - at}
        elif best is not None and before is not None:
            fitted = _mark_redone(fitted, _share_redone(before, sample, best))
        yield at, stop, fitted
        at, before = stop, sample
    if not is_first and (before is None or (trains and not before.steps)):
        tail = RECOVERY
    else:
        tail = _find_tail(life, before, later=later)
    yield at, end, {tail: end - at}


def _find_tail(life: Life, last: Sample | None, *, later: bool) -> str:
    """Return what a process did from its last sample on. It came as far as training, or is the first of its
    task."""
    if last is None:
        return IMPORT
    if life.ended is not None and life.code is not None and life.code >= 0:
        return SCRIPT  # a process that ends by itself writes its last sample as it does
    activity = last.activity or activity_of(last.place)
    # The step that it was killed in is done again.
    return RECOVERY if later and life.ended is not None and activity in PRODUCTIVE else activity


def _cut(piece: Piece, name: str, times: Sequence[tuple[float, float]], instead: str) -> Iterable[Piece]:
    """Yield a piece, cut at `times`, in which what was spent on `name` alone was spent on `instead`."""
    at, end, seconds = piece
    if set(seconds) != {name}:
        yield piece
        return
    for began, ended in sorted(times):
        began, ended = max(began, at), min(ended, end)
        if ended > began:
            yield at, began, {name: began - at}
            yield began, ended, {instead: ended - began}
            at = ended
    yield at, end, {name: end - at}


def _fit(seconds: Seconds, span: float, filler: str | None) -> Seconds:
    """Return `seconds` so that they add up to `span`. The rest is the filler's, or all activities'."""
    total = sum(seconds.values())
    if filler is not None and total < span:
        return {**seconds, filler: seconds.get(filler, 0.0) + span - total}
    if total < _LEAST:
        return {SCRIPT: span}
    return {name: value * (span / total) for name, value in seconds.items()}


def _share_redone(before: Sample, after: Sample, best: CallUpdates) -> float:
    """Return the share of the steps between two samples that were done before, up to `best`."""
    if (
        before.updates is None
        or after.updates is None
        or (after.call, after.updates) <= (before.call, before.updates)
    ):
        return 0.0
    if after.call != best[0]:
        return float(after.call < best[0])
    first = before.updates if before.call == after.call else 0
    return min(1.0, max(0.0, (best[1] - first) / max(1, after.updates - first)))


def _mark_redone(seconds: Seconds, share: float) -> Seconds:
    """Return `seconds` with a share of the steps as done in vain before."""
    if not share:
        return seconds
    moved = sum(seconds.get(name, 0.0) for name in _OF_STEPS) * share
    kept = {name: value * (1 - share) if name in _OF_STEPS else value for name, value in seconds.items()}
    return {**kept, REDONE: moved}


def _merge(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Return at most `most` segments, in which neighbours are added up."""
    size = -(-len(segments) // most) or 1
    groups = [segments[start : start + size] for start in range(0, len(segments), size)]
    return [Segment(own[0].start, own[-1].end, _add_up(each.seconds for each in own)) for own in groups]


def _add_up(many: Iterable[Mapping[str, float]]) -> Seconds:
    total = dict.fromkeys(JOB_ACTIVITIES, 0.0)
    for seconds in many:
        for name, value in seconds.items():
            total[name] += value
    return {name: value for name, value in total.items() if value}


def average(accounts: Sequence[TaskAccount]) -> Seconds:
    """Return the mean over tasks of the seconds by activity, which adds up to the time of the job."""
    total = _add_up(account.seconds for account in accounts)
    return {name: value / len(accounts) for name, value in total.items()}


def validate(account: TaskAccount, wall: float) -> None:
    """Raise ValueError if an account has gaps, or doesn't add up to the `wall` time of the job."""
    segments = account.segments
    rules = {
        "segments follow each other": all(a.end == b.start for a, b in pairwise(segments)),
        "segments cover the job": not segments
        or (segments[0].start == 0.0 and abs(segments[-1].end - wall) <= 1e-6 * max(1.0, wall)),
        "no activity has less than no time": all(v >= 0 for s in segments for v in s.seconds.values()),
        "seconds add up": abs(sum(account.seconds.values()) - wall) <= 0.01 * wall + 1e-6,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"{'; '.join(broken)}: {account}")
