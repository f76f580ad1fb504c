"""The samples of a task: what it has done, measured by itself up to twice a second while it trains.

They are lines of JSON in the task's folder, one behind the other, through all of its incarnations. All counts
and seconds of a sample are since its process started, so the difference of two samples is what happened
between them. A file that has become long is thinned out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import replace_file

MOST = 4000
"""Samples that a file holds at most."""
KEPT = 2000
"""Samples that are kept of a file with more than `MOST`."""
_NEWEST = 200
"""The newest of those, of which all are kept."""
_TAIL = 1 << 16
"""Bytes at the end of a file in which the last samples are looked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts and seconds of one process of a task until a time."""

    #: When, in seconds since 1970.
    at: float
    #: The task's incarnation, from 1.
    attempt: int
    #: When its process started, or a standby process became the task, in seconds since 1970.
    started: float
    #: The epoch under way, from 0; -1 before training.
    epoch: int = -1
    #: The step that comes next in it, from 0; -1 before training.
    step: int = -1
    #: Number of the script's call of `fit` under way, from 0: the same in each run of the script.
    call: int = 0
    #: Updates that the model has had, in all runs; None if that isn't known.
    updates: int | None = None
    #: Steps that this process has done.
    steps: int = 0
    #: Rows that this process has fed to the model.
    rows: int = 0
    #: The logs of the last step, by name, as Keras shows them; at an epoch's end with those of its tests.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: The task's next action, as in its progress record.
    place: str = ""
    #: The activity of the task then; "" if that isn't known.
    activity: str = ""
    #: Seconds by activity (`insitu.base.measure.time_account`).
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: How often each task came last at an operation of the exchange, by the task's name.
    last: Mapping[str, int] = field(default_factory=dict)
    #: Seconds of processor time that the process has used.
    cpu: float = 0.0
    #: Bytes of physical memory that it has.
    memory: int = 0
    #: The GPUs that it sees, as `insitu.train.elastic.progress_reporter.read_gpus` returns them.
    gpus: Sequence[Mapping[str, float]] = field(default_factory=list)

    def to_line(self) -> bytes:
        """Return the line of the file."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


_COUNTS = ("attempt", "epoch", "step", "call", "steps", "rows", "memory")
_OF_GPU = {"index", "utilization", "memory"}
_MAX_NUMBER = 1 << 63
_NAMES = frozenset(each.name for each in fields(Sample))


def read_samples(path: Path) -> list[Sample]:
    """Return all samples in a file, oldest first."""
    try:
        return _parse(path.read_bytes())
    except OSError:
        return []


def read_last_samples(path: Path) -> list[Sample]:
    """Return the last samples in a file, oldest first: some minutes of them."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            return _parse(file.read())
    except OSError:
        return []


def _parse(data: bytes) -> list[Sample]:
    """Return the samples in whole lines; others, as of a process that was killed, are passed over."""
    return [sample for line in data.splitlines() if (sample := _parse_line(line)) is not None]


@functools.lru_cache(maxsize=MOST)
def _parse_line(line: bytes) -> Sample | None:
    try:
        values: dict[str, Any] = json.loads(line)
        # A later version may write more.
        sample = Sample(**{name: value for name, value in values.items() if name in _NAMES})
        return sample if _is_sound(sample) else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _is_sound(sample: Sample) -> bool:
    """Return whether each field is of its type: the file may have come from another host.

    Raises ValueError for names that UTF-8 can't hold, AttributeError and TypeError for what has no names.
    """
    counts = [getattr(sample, name) for name in _COUNTS]
    if sample.updates is not None:
        counts.append(sample.updates)
    numbers = [*sample.metrics.values(), *sample.seconds.values(), *sample.last.values()]
    names = [sample.place, sample.activity, *sample.metrics, *sample.seconds, *sample.last]
    for gpu in sample.gpus:
        if not gpu.keys() >= _OF_GPU:
            return False
        numbers += gpu.values()
    for name in names:
        name.encode()
    return (
        all(type(count) is int for count in counts)
        and all(_is_number(each) for each in (*counts, *numbers))
        and all(_is_number(each) and math.isfinite(each) for each in (sample.at, sample.started, sample.cpu))
    )


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_MAX_NUMBER < value < _MAX_NUMBER)


def thin(samples: Sequence[Sample], most: int = KEPT) -> list[Sample]:
    """Return at most `most` of the samples, evenly over the time: the newest, and of each incarnation the
    last and the first with a step. Pure."""
    if len(samples) <= most:
        return list(samples)
    interval = (samples[-1].at - samples[0].at) / max(1, most - _NEWEST) * 2
    kept: list[Sample] = []
    since = -math.inf
    for index, sample in enumerate(samples):
        before = samples[index - 1] if index else None
        after = samples[index + 1] if index + 1 < len(samples) else None
        is_last = after is None or after.attempt != sample.attempt
        is_first_step = sample.steps > 0 and (
            before is None or before.attempt != sample.attempt or not before.steps
        )
        if is_last or is_first_step or index >= len(samples) - _NEWEST or sample.at - since >= interval:
            kept.append(sample)
            since = sample.at
    return kept[-most:]


class SampleWriter:
    """Appends the samples of one task to its file.

    Training doesn't depend on them: if there is no room, samples are missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Samples in the file. Counted as the first one is written.
        self._count = -1

    def write(self, sample: Sample) -> None:
        """Append a sample."""
        with contextlib.suppress(OSError):
            if self._count < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._count = len(read_samples(self._path))
            _append_line(self._path, sample.to_line())
            self._count += 1
            if self._count > MOST:
                kept = thin(read_samples(self._path), KEPT)
                replace_file(self._path, b"".join(each.to_line() for each in kept))
                self._count = len(kept)


def _append_line(path: Path, line: bytes) -> None:
    """Write a line behind the others, also behind one that was cut off."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" + line if torn else line)
