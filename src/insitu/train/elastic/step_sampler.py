"""Measures what this task does while it trains, for `insitu describe`, `insitu top` and goodput."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from insitu.context import Context
from insitu.exchange import Group
from insitu.gpus import GpuReader
from insitu.processes import read_resident_bytes
from insitu.task_samples import Sample, SampleWriter
from insitu.time_account import ACCOUNT, CALLBACKS, COMPILE, EXCHANGE, GRADIENT, WAIT
from insitu.train.elastic.position import SETUP, LoopPosition

INTERVAL = 0.5
"""Seconds between two samples of a training."""
_AT_LEAST = 0.1
"""Seconds between two samples that something else than the time asks for, such as the end of an epoch."""
GPU_INTERVAL = 2.0
"""Seconds between two looks at the GPUs, which take longer than all else."""


_OPEN: weakref.WeakSet[StepSampler] = weakref.WeakSet()
"""Those that write, until they are freed with their strategy."""


class StepSampler:
    """Counts this task's steps and writes samples of them. Outside a job it writes nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Writes the samples; None outside a job, and before `open`.
        self._writer: SampleWriter | None = None
        #: When the next sample is due, by the monotonic clock.
        self._due = 0.0
        #: When the last sample was written, by the same clock.
        self._written_at = 0.0
        #: The group whose waits are accounted for; a dead reference before there is one. Written by `watch`.
        self._group: Callable[[], Group | None] = _no_group
        #: Seconds that the group has waited and moved bytes so far, and who came last by rank. Written by
        #: `_account_for_waits`.
        self._waiting, self._moving = 0.0, 0.0
        self._last_by_rank: Counter[int] = Counter()
        #: How often each task came last, by name.
        self._last: Counter[str] = Counter()
        #: Returns the updates of the model that is trained; None before a fit. Written by `begin`.
        self._read_updates: Callable[[LoopPosition], int | None] = _unknown
        #: Steps done by this process.
        self._steps = 0
        #: Steps done when the updates were last read, and how many those were.
        self._updates: tuple[int, int | None] = (0, None)
        #: The position that comes next, and what the task was about to do.
        self._position = LoopPosition(0, SETUP, epoch=-1, step=-1)
        self._place = ""
        self._rows = 0
        #: The logs of the last step, and those that came at the end of an epoch.
        self._logs: Mapping[str, Any] = {}
        self._epoch_logs: Mapping[str, Any] = {}
        self._gpus = GpuReader()
        self._gpus_read_at = 0.0
        self._gpu_loads: list[dict[str, float]] = []

    def open(self) -> None:
        """Begin to write samples, once."""
        job = self._context.job
        if job is not None and self._writer is None:
            self._writer = SampleWriter(job.samples(self._context.task))
            _OPEN.add(self)

    def begin(self, read_updates: Callable[[LoopPosition], int | None]) -> None:
        """Begin a training whose updates `read_updates` returns, given the position that comes next."""
        self._read_updates = read_updates
        self._logs = self._epoch_logs = {}
        # Each epoch of a custom loop begins a training, and may be a single step.
        self._due = self._written_at + _AT_LEAST

    def end(self) -> None:
        """End the training: write its last sample, and let go of the model."""
        if self._logs or time.monotonic() - self._written_at >= _AT_LEAST:
            self.write()
        self._read_updates, self._logs = _unknown, {}

    def watch(self, group: Group) -> None:
        """Account for what this task waits for the others of `group`."""
        self._group = weakref.ref(group)
        self._waiting, self._moving, self._last_by_rank = 0.0, 0.0, Counter()

    def count_step(self, position: LoopPosition, rows: int, logs: Mapping[str, Any]) -> None:
        """Count a step that was done: `position` comes next, and `rows` is the number of rows so far."""
        ACCOUNT.enter(CALLBACKS)
        self._steps += 1
        self._position, self._rows, self._logs = position, rows, logs
        if self._writer is not None and time.monotonic() >= self._due:
            self.write()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Take over the logs of an epoch's end, which has those of the validation."""
        self._epoch_logs = dict(logs)
        if time.monotonic() - self._written_at >= _AT_LEAST:
            self.write()

    def report_place(self, place: str) -> None:
        """Take over what the task is about to do."""
        self._place = place
        ACCOUNT.enter_place(place)

    @contextlib.contextmanager
    def hold(self, activity: str) -> Iterator[None]:
        """Count all time while open to `activity`."""
        self._account_for_waits(None if ACCOUNT.is_held else EXCHANGE)
        try:
            with ACCOUNT.hold(activity):
                yield
        finally:
            # Until a step is compiled tasks wait for others that import; later they wait in the activity.
            self._account_for_waits(COMPILE if activity == COMPILE else None)

    def _account_for_waits(self, source: str | None) -> None:
        """Count what the group has waited since the last call as waiting, which `source` was counted as."""
        group = self._group()
        if group is None:
            return
        stats = list(group.stats.values())
        waited = sum(each.waiting for each in stats) - self._waiting
        moved = sum(each.moving for each in stats) - self._moving
        self._waiting, self._moving = self._waiting + waited, self._moving + moved
        last: Counter[int] = Counter()
        for each in stats:
            last.update(each.last)
        news, self._last_by_rank = last - self._last_by_rank, last
        if source is None:
            return
        if source == EXCHANGE:
            for rank, count in news.items():
                with contextlib.suppress(IndexError):
                    self._last[str(group.task(rank))] += count
        left = waited - ACCOUNT.move(source, WAIT, waited)
        if source == EXCHANGE and left > 0:
            # In a custom loop the exchange is a part of the user's step.
            ACCOUNT.move(GRADIENT, WAIT, left)
            ACCOUNT.move(GRADIENT, EXCHANGE, moved)

    @property
    def steps(self) -> int:
        """Steps that this process has done."""
        return self._steps

    def write(self) -> None:
        """Write a sample now."""
        if self._writer is None:
            return
        now = self._written_at = time.monotonic()
        self._due = now + INTERVAL
        if now - self._gpus_read_at >= GPU_INTERVAL:
            self._gpus_read_at, self._gpu_loads = now, self._gpus.read()
        self._account_for_waits(EXCHANGE)
        at, used = time.time(), os.times()
        # Those of an epoch's end are shown once; steps of the next one have other logs.
        logs, self._epoch_logs = {**self._logs, **self._epoch_logs}, {}
        self._writer.write(
            Sample(
                at=round(at, 6),
                attempt=self._context.incarnation,
                started=round(at - ACCOUNT.age, 6),
                epoch=self._position.epoch,
                step=self._position.step,
                call=self._position.call,
                updates=self._count_updates(),
                steps=self._steps,
                rows=self._rows,
                metrics=_as_numbers(logs),
                place=self._place,
                seconds={name: round(seconds, 6) for name, seconds in ACCOUNT.read().items()},
                last=dict(self._last),
                cpu=round(used.user + used.system + used.children_user + used.children_system, 3),
                memory=read_resident_bytes(os.getpid()),
                gpus=self._gpu_loads,
            )
        )

    def _count_updates(self) -> int | None:
        """Return the updates of the model, read once for each step that was done."""
        if self._steps and self._updates[0] != self._steps:
            # Training doesn't end for a number that is only shown.
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                self._updates = (self._steps, self._read_updates(self._position))
        return self._updates[1]


@atexit.register
def _write_last() -> None:
    """Write what the process has done until its end."""
    for sampler in list(_OPEN):
        sampler.write()


def _no_group() -> Group | None:
    return None


def _unknown(position: LoopPosition) -> int | None:
    return None


def _as_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return those of the logs that are numbers."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found
