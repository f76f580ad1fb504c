"""Measures a task that doesn't train: a parameter server, or an evaluator."""

from __future__ import annotations

import os
import time

from insitu.base.context import Context
from insitu.base.measure.task_samples import Sample, SampleWriter
from insitu.base.measure.time_account import ACCOUNT, WAIT
from insitu.base.process.processes import read_resident_bytes

INTERVAL = 1.0
"""Seconds between two samples."""
SERVING = "serving"
"""The place of such a task: it waits for requests, or for checkpoints."""


class SideSampler:
    """Writes what such a task spends its time on, for goodput. Outside a job it writes nothing."""

    def __init__(self, context: Context) -> None:
        self._context = context
        job = context.job
        self._writer = None if job is None else SampleWriter(job.samples(context.task))
        #: When the next sample is due, by the monotonic clock.
        self._due = 0.0
        #: Seconds of processor time that were counted so far. Written by `write`.
        self._counted = _read_cpu()

    def write(self, busy: str | None = None, *, now: bool = False) -> None:
        """Write a sample if one is due, or `now`.

        Processor time that was used while the task waited counts as the activity `busy`."""
        if self._writer is None or (time.monotonic() < self._due and not now):
            return
        self._due = time.monotonic() + INTERVAL
        used = _read_cpu()
        ACCOUNT.read()
        if busy is not None:
            ACCOUNT.move(WAIT, busy, used - self._counted)
        self._counted = used
        at = time.time()
        self._writer.write(
            Sample(
                at=round(at, 6),
                attempt=self._context.incarnation,
                started=round(at - ACCOUNT.age, 6),
                place=SERVING,
                activity=ACCOUNT.activity,
                seconds={name: round(seconds, 6) for name, seconds in ACCOUNT.read().items()},
                cpu=round(used, 3),
                memory=read_resident_bytes(os.getpid()),
            )
        )


def _read_cpu() -> float:
    used = os.times()
    return used.user + used.system
