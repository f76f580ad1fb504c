"""Reports this task's position while it trains, for the controller, `insitu ps` and `insitu describe`."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.base.context import Context
from insitu.base.measure.task_samples import Sample, SampleWriter
from insitu.base.measure.time_account import ACCOUNT, CALLBACKS, EXCHANGE, GRADIENT
from insitu.base.process.processes import read_resident_bytes
from insitu.base.progress import IDLE, ProgressWriter
from insitu.exchange import Group
from insitu.train.elastic.position import EPOCH, SETUP, TEST, LoopPosition

_BEFORE_TRAINING = LoopPosition(0, SETUP, epoch=-1, step=-1)


class ProgressReporter:
    """Writes this task's progress record. Outside a job nobody reads it, so nothing is written.

    A record also says whether the task is elastic: whether the job can continue with a replacement if another
    task is lost now.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Writes the record; None outside a job, and before `open`.
        self._writer: ProgressWriter | None = None
        #: The position of the last `report`, which reports of a place alone repeat.
        self._position = _BEFORE_TRAINING
        #: The task's next action at the last report, such as `gradient`.
        self._place = ""
        #: Rows that entered the model in this process. Written by `Bookkeeper`.
        self.rows = 0
        #: Measures what this task does.
        self.sampler = StepSampler(context)
        #: Whether recovery was disabled for the rest of this process.
        self._disabled = False
        #: Whether a call is under way in the middle of another.
        self._paused = False

    def open(self) -> None:
        """Create the progress record, once."""
        job = self._context.job
        if job is not None and self._writer is None:
            self._writer = ProgressWriter(job.progress(self._context.task))
            self.sampler.open()

    def report(self, position: LoopPosition, place: str) -> None:
        """Report that the task is about to do `place` of the unit at `position`."""
        self._position = position
        self.report_place(place)

    def report_place(self, place: str) -> None:
        """Report what the task is about to do, at the position of the last report."""
        self._place = place
        self.sampler.report_place(place)
        self._write()

    def _write(self) -> None:
        if self._writer is not None:
            self._writer.elastic = self.elastic and self._writer.generation > 0
            self._writer.steps_over = self._position.kind in (TEST, EPOCH)
            self._writer.write(self._position.epoch, self._position.step, self.rows, self._place)

    def report_idle(self) -> None:
        """Report that training has stopped: the task may take as long as it likes for whatever it does."""
        self.report_place(IDLE)
        self.sampler.end()

    def begin_training(self, read_updates: Callable[[LoopPosition], int | None]) -> None:
        """Begin a training. `read_updates` returns the updates of its model, given the position that comes
        next, or None if they aren't known."""
        self.open()
        self.sampler.begin(read_updates)

    def count_step(self, logs: Mapping[str, Any]) -> None:
        """Count the step of the last report, which was done with these logs."""
        self.sampler.count_step(self._position.next_step(), self.rows, logs)

    @property
    def place(self) -> str:
        """The task's next action at the last report."""
        return self._place

    @property
    def elastic(self) -> bool:
        """Whether this task can continue with another in the place of one that is lost."""
        return not (self._disabled or self._paused)

    def disable_recovery(self) -> None:
        """Report from now on that a loss restarts all tasks."""
        if not self._disabled:
            self._disabled = True
            self._write()

    @contextlib.contextmanager
    def pause_recovery(self) -> Iterator[None]:
        """Report while open that a loss restarts all tasks: a replacement can't reach this one's position."""
        outer, self._paused = self._paused, True
        self._write()
        try:
            yield
        finally:
            self._paused = outer
            self._write()

    def set_generation(self, generation: int) -> None:
        """Report with the next record that this task's group is of `generation`."""
        if self._writer is not None:
            self._writer.generation = generation


# Measures what this task does while it trains, for `insitu describe`, `insitu top` and goodput


INTERVAL = 0.5
"""Seconds between two samples of a training."""
_AT_LEAST = 0.1
"""Seconds between two samples that something else than the time asks for, such as the end of an epoch."""
GPU_INTERVAL = 2.0
"""Seconds between two looks at the GPUs, which take longer than all else."""
_EXCHANGING = frozenset({EXCHANGE, GRADIENT})
"""Activities in which tasks exchange gradients: a custom loop's step holds its exchange."""


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
        #: `_take_waits`.
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
        take = weakref.WeakMethod(self._take_waits)

        def read_waits(activity: str) -> tuple[float, float]:
            own = take()
            return (0.0, 0.0) if own is None else own(activity)

        ACCOUNT.split_waits(read_waits)

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
        if ACCOUNT.is_held and self._writer is not None and time.monotonic() >= self._due:
            self.write()  # an evaluation has no steps that do so

    @contextlib.contextmanager
    def hold(self, activity: str) -> Iterator[None]:
        """Count all time while open to `activity`."""
        with ACCOUNT.hold(activity):
            if time.monotonic() - self._written_at >= _AT_LEAST:
                self.write()  # it may take long, and the process may be killed in it
            yield

    def _take_waits(self, activity: str) -> tuple[float, float]:
        """Return the seconds that the group has waited, and those in which it has moved bytes, since the last
        call. Waits for the one that came last at the exchange count against it."""
        group = self._group()
        if group is None:
            return 0.0, 0.0
        stats = list(group.stats.values())
        waited = sum(each.waiting for each in stats) - self._waiting
        moved = sum(each.moving for each in stats) - self._moving
        if waited or moved:
            self._waiting, self._moving = self._waiting + waited, self._moving + moved
            self._count_last(group, counts=activity in _EXCHANGING)
        return max(0.0, waited), max(0.0, moved)

    def _count_last(self, group: Group, *, counts: bool) -> None:
        """Take over who came last since the last call, and count it if it `counts`."""
        last: Counter[int] = Counter()
        for each in group.stats.values():
            last.update(each.last)
        news, self._last_by_rank = last - self._last_by_rank, last
        for rank, count in news.items() if counts else ():
            with contextlib.suppress(IndexError):
                self._last[str(group.task(rank))] += count

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
        seconds = {name: round(spent, 6) for name, spent in ACCOUNT.read().items()}
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
                activity=ACCOUNT.activity,
                seconds=seconds,
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


# Load of this process' GPUs, by NVIDIA's management library if it is installed


_DRIVER = Path("/proc/driver/nvidia")
"""Made by the driver."""


class GpuReader:
    """Reads how busy the GPUs are that this process may use. Without GPUs, or without `nvidia-ml-py`, there
    are none."""

    def __init__(self) -> None:
        #: The library; None until the first look, and if there is none.
        self._library: Any = None
        #: The number of each device and the library's handle of it; None until the first look.
        self._devices: list[tuple[int, Any]] | None = None

    def read(self) -> list[dict[str, float]]:
        """Return for each device its number, utilization in [0, 1], and bytes of memory used and in all."""
        if self._devices is None:
            self._devices = self._find() if _DRIVER.exists() else []
        found = []
        for index, handle in self._devices:
            try:
                rates = self._library.nvmlDeviceGetUtilizationRates(handle)
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
            except self._library.NVMLError:
                continue
            found.append(
                {
                    "index": index,
                    "utilization": rates.gpu / 100,
                    "memory": int(memory.used),
                    "memory_total": int(memory.total),
                }
            )
        return found

    def _find(self) -> list[tuple[int, Any]]:
        try:
            self._library = importlib.import_module("pynvml")
        except ImportError:
            return []
        try:
            self._library.nvmlInit()
            count = self._library.nvmlDeviceGetCount()
            return [(index, self._library.nvmlDeviceGetHandleByIndex(index)) for index in _choose(count)]
        except self._library.NVMLError:
            return []


def _choose(count: int) -> list[int]:
    """Return the numbers of the devices that this process may use, out of `count`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    names = [name.strip() for name in visible.split(",")]
    # If devices are named by their identities, their numbers aren't known: only known numbers are shown.
    return [int(name) for name in names if name.isdecimal() and int(name) < count]
