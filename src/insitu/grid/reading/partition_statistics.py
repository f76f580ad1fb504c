"""Statistics of the columns of a dataset: one pass over each partition where it is, for all tasks of a job.

In a job each task reads the partitions of its shards, and leaves their statistics in the job's folder, from
which all tasks take those of the others. So a task that is started again finds what was done. A partition's
statistics follow from its rows alone, and are given in the order of partitions: all that is made of them is
the same bits in each task, on any number of nodes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.context import context as read_context
from insitu.base.disk.durable import replace_file
from insitu.base.errors import InputError, InsituError
from insitu.base.spec import CacheSpec, ShardMap
from insitu.grid.reading.structure import Structure

Arrays = dict[str, npt.NDArray[Any]]
"""Statistics as arrays that `numpy.savez` writes."""
_POLL_SECONDS = 0.05
_TAKE_OVER_SECONDS = 60.0
"""Seconds without news of the others' partitions, after which a task reads one of them itself."""
_PROGRESS_SECONDS = 5.0
_calls = itertools.count()
"""Numbers the calls of this process: the tasks of a job make the same ones."""


class Statistic(Protocol):
    """Computes one kind of statistics."""

    def of_partition(self, blocks: Iterable[npt.NDArray[Any]]) -> Arrays:
        """Return the statistics of a partition's rows. Raises InputError."""

    def merge(self, parts: Sequence[Arrays]) -> Arrays:
        """Return those of all partitions, given in order."""


class PartitionedRows(Protocol):
    """What is read here of an insitu.Dataset."""

    @property
    def cache(self) -> CacheSpec: ...

    @property
    def shard_map(self) -> ShardMap: ...

    @property
    def shards(self) -> tuple[int, ...]: ...

    @property
    def element_spec(self) -> Structure: ...

    def partition_batches(self, shard: int, partition: int, lock: threading.Lock) -> Iterable[Structure]: ...


class PartitionStatistics:
    """Computes the statistics of all partitions of a dataset, those of this task's shards first."""

    def __init__(
        self,
        data: PartitionedRows,
        statistics: Mapping[str, Statistic],
        pick: Callable[[Any, str], Any],
        call: str,
        advise: Callable[[InputError, str], str] = lambda error, name: "",
    ) -> None:
        """`pick` returns the values of a name in `statistics` of a batch. `call` is what the script has
        called, such as "insitu.adapt". `advise` says what to do about an error in the values of a name."""
        self._call = call
        self._advise = advise
        self._data = data
        self._statistics = statistics
        self._pick = pick
        shards = data.shard_map.shards
        #: The shard of each partition.
        self._shard_of = {index: shard for shard, held in enumerate(shards) for index in held}
        context = read_context()
        self._job = context.job
        self._is_chief = context.is_chief
        own = data.shards if self._job is not None else range(len(shards))
        self._own = sorted(index for shard in own for index in shards[shard])
        #: Where the tasks of a job leave statistics; None outside a job. Written by `compute`.
        self._folder: Path | None = None
        #: Held while a user's function maps rows. They are read and counted in threads.
        self._mapping = threading.Lock()
        #: When the last line of progress was printed, by the monotonic clock.
        self._printed = time.monotonic()

    def compute(self) -> list[dict[str, Arrays]]:
        """Return the statistics by layer of each partition, in their order. Raises InputError."""
        number = next(_calls)
        if self._job is not None:
            cache = self._data.cache
            said = repr(
                (cache.name, cache.version, sorted((n, repr(s)) for n, s in self._statistics.items()))
            )
            digest = hashlib.sha256(said.encode()).hexdigest()[:16]
            self._folder = self._job.statistics / f"{number:05d}-{digest}"
            self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[int, dict[str, Arrays]] = {}
        with ThreadPoolExecutor(max(1, min(len(self._own), os.cpu_count() or 1))) as pool:
            for index, part in zip(self._own, pool.map(self._find_or_read, self._own), strict=True):
                found[index] = part
                self._report(len(found))
        self._collect(found)
        return [found[index] for index in sorted(found)]

    def _collect(self, found: dict[int, dict[str, Arrays]]) -> None:
        """Wait for the partitions that other tasks read. One that nobody leaves is read here."""
        since = time.monotonic()
        while missing := [index for index in sorted(self._shard_of) if index not in found]:
            news = [(index, part) for index in missing if (part := self._load(index)) is not None]
            found.update(news)
            if news:
                since = time.monotonic()
                self._report(len(found))
            elif time.monotonic() - since > _TAKE_OVER_SECONDS:
                found[missing[0]] = self._read_of_others(missing[0])
            else:
                time.sleep(_POLL_SECONDS)

    def _read_of_others(self, index: int) -> dict[str, Arrays]:
        """Read a partition of another task's shards. Raises InputError if this task can't."""
        try:
            return self._read(index)
        except InputError:
            raise
        except InsituError as error:
            raise InputError(
                f"In a job {self._call} needs hosts that share the job's folder, or reach all partitions. "
                f"Received: partition {index} of {self._data.cache.name}, of which no task has left "
                f"statistics, and {type(error).__name__}: {error}. Call it in all tasks, or give it the "
                "mean, boundaries or vocabulary"
            ) from error

    def _find_or_read(self, index: int) -> dict[str, Arrays]:
        return self._load(index) or self._read(index)

    def _read(self, index: int) -> dict[str, Arrays]:
        """Return the statistics of one partition, and leave them for the others."""
        blocks = list(self._data.partition_batches(self._shard_of[index], index, self._mapping))
        part = {}
        for name, statistic in self._statistics.items():
            try:
                part[name] = statistic.of_partition([self._pick(block, name) for block in blocks])
            except InputError as error:
                of = f"the feature {name!r} in " if name else ""
                place = f"This is {of}partition {index} of {self._data.cache.name}"
                advice = self._advise(error, name)
                raise InputError(f"{error}. {place}{advice and f'. {advice}'}") from error
        if self._folder is not None:
            buffer = io.BytesIO()
            named: dict[str, Any] = {
                f"{name}/{key}": v for name, arrays in part.items() for key, v in arrays.items()
            }
            np.savez(buffer, **named)
            replace_file(self._folder / f"{index:05d}.npz", buffer.getvalue())
        return part

    def _load(self, index: int) -> dict[str, Arrays] | None:
        """Return what a task has left of a partition, or None."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / f"{index:05d}.npz", allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
        except FileNotFoundError:
            return None
        part: dict[str, Arrays] = {name: {} for name in self._statistics}
        for name, values in arrays.items():
            layer, _, key = name.rpartition("/")
            part[layer][key] = values
        return part

    def _report(self, done: int) -> None:
        now = time.monotonic()
        if self._is_chief and (now - self._printed >= _PROGRESS_SECONDS):
            self._printed = now
            sys.stderr.write(f"[insitu] {self._call}: {done} of {len(self._shard_of)} partitions\n")
            sys.stderr.flush()
