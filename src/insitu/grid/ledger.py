"""The ledger: the rows of each partition that have entered the model, by epoch.

It doesn't list rows. It counts them and sums up hashes of their indices. If each partition's count and sum
are those of all its rows, then every row was counted once, but for a chance of about 2**-64 that other rows
have the same sum. If the count differs, it shows how many rows were lost or repeated, not which. If as many
rows were lost as were repeated, only the sum differs.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.errors import GridError
from insitu.grid.files import publish_file
from insitu.grid.layout import splitmix64
from insitu.paths import JobPaths
from insitu.spec import CacheSpec, ShardMap

_MASK = 2**64 - 1
_PENDING_ROWS = 1 << 16
_CHUNK_ROWS = 1 << 20
_LEDGER = re.compile(r"epoch-(\d+)\.shard-\d+\.json")
"""What JobPaths.epoch_ledger returns names of this form."""


@dataclass(slots=True)
class RowCount:
    """The rows of one partition that have entered the model."""

    #: How many they are; a row that came twice counts twice.
    rows: int = 0
    #: The sum of the rows' hashes, modulo 2**64.
    checksum: int = 0


class ShardLedger:
    """The rows of one shard that entered the model in one epoch. Written by the task that runs the shard.

    Save `to_json()` with each checkpoint and go on from it: rows after the checkpoint are trained on again,
    and must then be counted again.
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
        try:
            return cls.from_json(json.loads(job.epoch_ledger(epoch, shard).read_text()))
        except (OSError, ValueError, GridError):
            return None

    def publish(self, job: JobPaths) -> None:
        """Write the ledger to the job's folder in one atomic step. Raises StorageFull."""
        publish_file(job.epoch_ledger(self.epoch, self.shard), json.dumps(self.to_json()).encode())


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


def list_epochs(job: JobPaths) -> list[int]:
    """Return the epochs of which a task of a job has published a ledger, in order. Opens no ledger."""
    return sorted({epoch for epoch, _ in _list_files(job)})


def read_ledgers(job: JobPaths, first: int = 0) -> list[ShardLedger]:
    """Return the ledgers that the tasks of a job have published of the epochs from `first` on, by epoch and
    shard. Raises GridError."""
    ledgers = []
    for epoch, name in _list_files(job):
        if epoch < first:
            continue
        path = job.ledger / name
        try:
            ledgers.append(ShardLedger.from_json(json.loads(path.read_text())))
        except (ValueError, GridError) as error:
            raise GridError(f"The ledger at {path} can't be read ({error})") from error
    return sorted(ledgers, key=lambda ledger: (ledger.epoch, ledger.shard))


def _list_files(job: JobPaths) -> list[tuple[int, str]]:
    """Return the epoch and the name of each published ledger, in order of the names."""
    try:
        names = sorted(os.listdir(job.ledger))
    except FileNotFoundError:
        return []
    return [(int(found[1]), name) for name in names if (found := _LEDGER.fullmatch(name))]


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
    """One epoch. Where it isn't `complete`, rows are still to come, and none are called lost."""

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
    without holding it makes the epoch unclean. Raises GridError where the map is of another version, or
    a ledger of a shard or partition that there isn't.
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
