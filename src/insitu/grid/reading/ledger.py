"""The ledger: the rows of each partition that have entered the model, by epoch.

It doesn't list rows. It counts them and sums up hashes of their indices. If each partition's count and sum
are those of all its rows, then every row was counted once, but for a chance of about 2**-64 that other rows
have the same sum. If the count differs, it shows how many rows were lost or repeated, not which. If as many
rows were lost as were repeated, only the sum differs.

A task writes a file for each epoch of a shard. Every `_MERGED_EVERY` epochs it merges those of its shard into
one file, in which epochs of the same counts are one entry. So a long training has few files, and short ones.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import GridError
from insitu.base.paths import JobPaths
from insitu.base.spec import CacheSpec, ShardMap
from insitu.grid.catalog import publish_file
from insitu.grid.layout import splitmix64

_MASK = 2**64 - 1
_PENDING_ROWS = 1 << 16
_CHUNK_ROWS = 1 << 20
_LEDGER = re.compile(r"epoch-(\d+)(?:-(\d+))?\.shard-(\d+)\.json")
"""JobPaths.epoch_ledger returns names of this form."""
_MERGED_EVERY = 64
"""Epochs after which the files of a shard are merged."""
_TRIES = 5


@dataclass(slots=True)
class RowCount:
    """The rows of one partition that have entered the model."""

    #: How many they are; a row that came twice counts twice.
    rows: int = 0
    #: The sum of the rows' hashes, modulo 2**64.
    checksum: int = 0


class ShardLedger:
    """The rows of one shard that entered the model in one epoch. Written by the task that runs the shard.

    Save `to_json()` with each checkpoint and continue from it: rows after the checkpoint are trained on
    again, and must then be counted again.
    """

    def __init__(self, epoch: int, shard: int) -> None:
        self.epoch = epoch
        self.shard = shard
        #: Whether the epoch has ended for this shard.
        self.complete = False
        #: Partition -> counted rows whose gradients entered no update: they came too late or were not finite.
        self.left_out: dict[int, int] = {}
        self._counts: dict[int, RowCount] = {}
        self._pending: dict[int, list[npt.NDArray[np.int64]]] = {}
        self._pending_rows = 0

    def add(self, partition: int, row_indices: npt.NDArray[np.int64], *, left_out: bool = False) -> None:
        """Count these rows of a partition. The array must not change afterwards."""
        if left_out:
            self.left_out[partition] = self.left_out.get(partition, 0) + len(row_indices)
        self._pending.setdefault(partition, []).append(row_indices)
        self._pending_rows += len(row_indices)
        if self._pending_rows >= _PENDING_ROWS:
            self._add_pending()

    @property
    def counts(self) -> Mapping[int, RowCount]:
        """Partition -> its count."""
        self._add_pending()
        return self._counts

    def _add_pending(self) -> None:
        for partition, batches in self._pending.items():
            rows = np.concatenate(batches)
            count = self._counts.setdefault(partition, RowCount())
            count.rows += len(rows)
            count.checksum = (count.checksum + checksum_of_rows(rows)) & _MASK
        self._pending.clear()
        self._pending_rows = 0

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values.

        `{"epoch", "shard", "complete", "partitions": {INDEX: {"rows", "checksum" (16 hex digits)}},
        "left_out": {INDEX: rows}}`.
        """
        partitions = {
            str(index): {"rows": count.rows, "checksum": f"{count.checksum:016x}"}
            for index, count in sorted(self.counts.items())
        }
        return {
            "epoch": self.epoch,
            "shard": self.shard,
            "complete": self.complete,
            "partitions": partitions,
            "left_out": {str(index): rows for index, rows in sorted(self.left_out.items())},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardLedger:
        """Return the ledger that `to_json` was called on. Raises GridError for other data."""
        try:
            ledger = cls(int(data["epoch"]), int(data["shard"]))
            ledger.complete = bool(data["complete"])
            for index, count in data["partitions"].items():
                ledger._counts[int(index)] = RowCount(int(count["rows"]), int(count["checksum"], 16))
            for index, rows in data.get("left_out", {}).items():
                ledger.left_out[int(index)] = int(rows)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GridError(f"This is no ledger of a shard: {error!r}") from error
        return ledger

    @classmethod
    def published(cls, job: JobPaths, epoch: int, shard: int) -> ShardLedger | None:
        """Return what was published of one shard in one epoch; None if nothing that can be read was."""
        own = job.epoch_ledger(epoch, shard)
        files = [file for file in _list_files(job) if file.holds(epoch, shard)]
        for file in [file for file in files if file.path == own] or reversed(files):
            with contextlib.suppress(OSError, GridError):
                for run in _read(file):
                    if run.first <= epoch <= run.last:
                        return run.ledger_of(epoch)
        return None

    def publish(self, job: JobPaths) -> None:
        """Write the ledger to the job's folder in one atomic step. Raises StorageFull."""
        publish_file(job.epoch_ledger(self.epoch, self.shard), json.dumps(self.to_json()).encode())
        if (self.epoch + 1) % _MERGED_EVERY == 0:
            # Files that can't be merged now are merged the next time.
            with contextlib.suppress(OSError, GridError):
                merge_epochs(job, self.shard)


def checksum_of_rows(rows: npt.NDArray[np.int64]) -> int:
    """Return the sum, modulo 2**64, of the hashes of these row indices; their order doesn't matter."""
    return int(splitmix64(rows.astype(np.uint64)).sum(dtype=np.uint64))


@functools.lru_cache(maxsize=4096)
def checksum_of_all_rows(rows: int) -> int:
    """Return `checksum_of_rows` of 0, 1, ..., rows - 1."""
    total = 0
    for start in range(0, rows, _CHUNK_ROWS):
        total += checksum_of_rows(np.arange(start, min(rows, start + _CHUNK_ROWS)))
    return total & _MASK


@dataclass(frozen=True, slots=True)
class _LedgerFile:
    """A published file: of one epoch, or of several that were merged."""

    #: Its path.
    path: Path
    #: The shard whose rows it counts.
    shard: int
    #: The first epoch that it may hold.
    first: int
    #: The last one.
    last: int
    #: Whether it holds several epochs, in runs.
    merged: bool

    def holds(self, epoch: int, shard: int) -> bool:
        """Return whether it may hold an epoch of a shard."""
        return self.shard == shard and self.first <= epoch <= self.last


@dataclass(frozen=True, slots=True)
class _Run:
    """Epochs one behind the other in which a shard had the same counts."""

    #: The first epoch.
    first: int
    #: The last one.
    last: int
    #: The value of `ShardLedger.to_json`, without the epoch.
    counts: Mapping[str, Any]

    def ledger_of(self, epoch: int) -> ShardLedger:
        return ShardLedger.from_json({**self.counts, "epoch": epoch})


def list_epochs(job: JobPaths) -> list[int]:
    """Return the epochs of which a task of a job has published a ledger, in order. Raises GridError."""
    return sorted({epoch for epoch, _ in _read_all(job)})


def read_ledgers(job: JobPaths, first: int = 0) -> list[ShardLedger]:
    """Return the ledgers that the tasks of a job have published of the epochs from `first` on, by epoch and
    shard. Raises GridError."""
    return [run.ledger_of(epoch) for (epoch, _), run in sorted(_read_all(job, first).items(), key=_get_key)]


def count_rows(job: JobPaths) -> int:
    """Return the rows that have entered the model by the published ledgers of a job. Raises GridError."""
    rows: dict[int, int] = {}
    total = 0
    for run in _read_all(job).values():
        if id(run) not in rows:
            rows[id(run)] = sum(count.rows for count in run.ledger_of(run.first).counts.values())
        total += rows[id(run)]
    return total


def _get_key(item: tuple[tuple[int, int], _Run]) -> tuple[int, int]:
    return item[0]


def merge_epochs(job: JobPaths, shard: int) -> None:
    """Merge the files of a shard's epochs. Only for the task that runs the shard. Raises OSError, GridError.

    Merged files are removed by the next merging: until then another host may copy the files one by one, and
    always has each epoch.
    """
    files = [file for file in _list_files(job) if file.shard == shard]
    newest = max(
        (file for file in files if file.merged), key=lambda file: (file.last, file.first), default=None
    )
    kept = _expand([] if newest is None else _read(newest))
    merged, done = dict[int, Mapping[str, Any]](), list[Path]()
    for file in files:  # in this order: the file of an epoch is newer than what was merged
        found = _expand(_read(file))
        if file != newest and all(kept.get(epoch) == counts for epoch, counts in found.items()):
            done.append(file.path)
        if file.merged or all(counts["complete"] for counts in found.values()):
            merged |= found
    if merged != kept:
        runs = [
            {"first": run.first, "last": run.last, **run.counts}
            for run in _compress(dict(sorted(merged.items())))
        ]
        path = job.epoch_ledger(min(merged), shard, max(merged))
        publish_file(path, json.dumps({"shard": shard, "runs": runs}).encode())
        done = [each for each in done if each != path]
    for path in done:
        path.unlink(missing_ok=True)


def _expand(runs: Iterable[_Run]) -> dict[int, Mapping[str, Any]]:
    """Return the counts of each epoch."""
    return {epoch: run.counts for run in runs for epoch in range(run.first, run.last + 1)}


def _compress(counts: Mapping[int, Mapping[str, Any]]) -> list[_Run]:
    """Return runs out of the counts of epochs, which are in order."""
    runs: list[_Run] = []
    for epoch, found in counts.items():
        if runs and runs[-1].last == epoch - 1 and runs[-1].counts == found:
            runs[-1] = replace(runs[-1], last=epoch)
        else:
            runs.append(_Run(epoch, epoch, found))
    return runs


def _read_all(job: JobPaths, first: int = 0) -> dict[tuple[int, int], _Run]:
    """Return what holds each (epoch, shard) from the epoch `first` on. Raises GridError."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return {
                (epoch, file.shard): run
                for file in _list_files(job)
                if file.last >= first
                for run in _read(file)
                for epoch in range(max(first, run.first), run.last + 1)
            }
        except FileNotFoundError:
            if not tries_left:  # else it was merged meanwhile
                raise
    raise AssertionError


def _read(file: _LedgerFile) -> list[_Run]:
    """Return what a published file holds. Raises GridError, OSError."""
    try:
        data = json.loads(file.path.read_bytes())
        parts = data["runs"] if file.merged else [{**data, "first": file.first, "last": file.last}]
        runs = []
        for part in parts:
            counts = ShardLedger.from_json({"epoch": part["first"], "shard": file.shard, **part}).to_json()
            del counts["epoch"]
            runs.append(_Run(int(part["first"]), int(part["last"]), counts))
        return runs
    except (ValueError, KeyError, TypeError, GridError) as error:
        raise GridError(f"The ledger at {file.path} can't be read ({error})") from error


def _list_files(job: JobPaths) -> list[_LedgerFile]:
    """Return the published files: those of several epochs first, so that those of one, which may be newer,
    come after them."""
    try:
        names = os.listdir(job.ledger)
    except FileNotFoundError:
        return []
    files = []
    for name in names:
        if found := _LEDGER.fullmatch(name):
            first, last = int(found[1]), int(found[2] or found[1])
            files.append(_LedgerFile(job.ledger / name, int(found[3]), first, last, found[2] is not None))
    return sorted(files, key=lambda file: (not file.merged, file.last, file.first, file.shard))


@dataclass(frozen=True, slots=True)
class PartitionAudit:
    """One partition in one epoch. `clean`: every row was counted once, as far as count and sum can prove
    it; in an epoch under way, that no more rows were counted than there are.
    """

    #: The partition's number in the cache.
    partition: int
    #: Rows that the partition has.
    expected: int
    #: Rows that entered the model.
    counted: int
    #: Whether the count and the checksum are as they must be.
    clean: bool
    left_out: int = 0
    """Rows among the counted ones whose gradients entered no update."""

    @property
    def lost(self) -> int:
        """Rows fewer than there are, at least."""
        return max(0, self.expected - self.counted)

    @property
    def repeated(self) -> int:
        """Rows more than there are, at least."""
        return max(0, self.counted - self.expected)


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """One epoch. If it isn't `complete`, rows are still to come, and none are called lost."""

    #: Its number, from 0.
    epoch: int
    #: Whether all shards have finished it.
    complete: bool
    #: The audit of each partition, in the order of their numbers.
    partitions: tuple[PartitionAudit, ...]
    #: The version of the cache whose rows they are.
    version: int = 0

    @property
    def expected(self) -> int:
        return sum(p.expected for p in self.partitions)

    @property
    def counted(self) -> int:
        return sum(p.counted for p in self.partitions)

    @property
    def lost(self) -> int:
        return sum(p.lost for p in self.partitions) if self.complete else 0

    @property
    def repeated(self) -> int:
        return sum(p.repeated for p in self.partitions)

    @property
    def left_out(self) -> int:
        return sum(p.left_out for p in self.partitions)

    @property
    def clean(self) -> bool:
        return all(p.clean for p in self.partitions)


def audit(
    cache: CacheSpec,
    shard_map: ShardMap,
    ledgers: Iterable[ShardLedger],
    version_at: Callable[[int], CacheSpec] | None = None,
) -> list[EpochAudit]:
    """Compare `ledgers` with the cache: return the audit of each epoch that one of them mentions, in order.

    `version_at` returns the version that an epoch has read, with the partitions of `cache`; None: `cache`.

    An epoch is complete once each shard that has rows has said so. A partition that a shard counted
    without holding it makes the epoch unclean. Raises GridError if the map is of another version, or a ledger
    of a shard or partition that there isn't.
    """
    if (cache.name, cache.version) != (shard_map.cache, shard_map.version):
        raise GridError(
            f"The shard map is of {shard_map.cache} version {shard_map.version}, the cache of {cache.name} "
            f"version {cache.version}"
        )
    by_epoch: dict[int, list[ShardLedger]] = {}
    for ledger in ledgers:
        if not 0 <= ledger.shard < len(shard_map.shards) or not set(ledger.counts) <= set(
            range(len(cache.partitions))
        ):
            raise GridError(f"Shard {ledger.shard}'s ledger of epoch {ledger.epoch} is of another cache")
        by_epoch.setdefault(ledger.epoch, []).append(ledger)
    return [
        _audit_epoch(version_at(epoch) if version_at else cache, shard_map, epoch, by_epoch[epoch])
        for epoch in sorted(by_epoch)
    ]


def _audit_epoch(
    cache: CacheSpec, shard_map: ShardMap, epoch: int, ledgers: Sequence[ShardLedger]
) -> EpochAudit:
    with_rows = {s for s, held in enumerate(shard_map.shards) if any(cache.partitions[p].rows for p in held)}
    complete = with_rows <= {ledger.shard for ledger in ledgers if ledger.complete}
    counted = [RowCount() for _ in cache.partitions]
    strayed: set[int] = set()
    for ledger in ledgers:
        for partition, count in ledger.counts.items():
            counted[partition].rows += count.rows
            counted[partition].checksum = (counted[partition].checksum + count.checksum) & _MASK
            if partition not in shard_map.shards[ledger.shard]:
                strayed.add(partition)
    partitions = []
    for info, count in zip(cache.partitions, counted, strict=True):
        whole = count.rows == info.rows and count.checksum == checksum_of_all_rows(info.rows)
        clean = (whole or (not complete and count.rows < info.rows)) and info.index not in strayed
        left_out = sum(ledger.left_out.get(info.index, 0) for ledger in ledgers)
        partitions.append(PartitionAudit(info.index, info.rows, count.rows, clean, left_out))
    return EpochAudit(epoch, complete, tuple(partitions), cache.version)
