"""The columns of a cache as a dataset reads them: partitions opened once, rows taken, bytes counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.errors import CorruptPartition
from insitu.base.paths import Paths
from insitu.base.process.processes import memory_bytes
from insitu.base.spec import CacheSpec, Column, NodeId, ShardMap
from insitu.grid.catalog import find_missing_here
from insitu.grid.layout import (
    MOST_SORTED,
    Order,
    Rows,
    ShuffledPlan,
    WindowOrder,
    count_blocks_before,
    order_rows,
)
from insitu.grid.partitions import (
    AddressSpace,
    BlockChecks,
    BlockedValues,
    Partition,
    TextValues,
    body_alignment,
    is_cut_short,
    is_variable,
    row_bytes,
)
from insitu.grid.reading.read_ahead import ReadAhead, ReadingThreads, ShardSource, WindowedColumns, read_rows
from insitu.grid.reading.reads import READS
from insitu.grid.reading.shard_memory import ShardMemory, bytes_in_memory
from insitu.grid.reading.store import Copy, announce_opening, open_blocks, open_version
from insitu.grid.reading.structure import Structure
from insitu.grid.replicas import DAMAGED

Read = tuple[Structure, int, tuple[tuple[int, Rows], ...]]
"""(structure of arrays, rows, origins) of one batch of one shard."""


ROW = "row"
"""The feature that is no column: the number of each row in the version, in the order of its partitions."""


def numbers_rows(cache: CacheSpec) -> bool:
    """Return whether ROW is the number of a row, not a column of the cache's own."""
    return all(column.name != ROW for column in cache.columns)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A partition, and the bytes that a row of the chosen columns takes."""

    #: The copy that is read.
    copy: Copy
    #: Bytes of the file that a row of the chosen columns takes; a mean if there is text.
    row_bytes: float
    #: Which of its blocks are right, of those read in place. None: all, or none is read in place.
    checks: BlockChecks | None


class CacheReader:
    """The chosen columns of one version of a cache. Shared by all datasets that are chained from one.

    `names` are the columns that are read: those of `features`, then `label` if there is one. The feature ROW
    is read from no file, unless the cache has a column of that name.
    """

    def __init__(
        self,
        paths: Paths,
        cache: CacheSpec,
        shard_map: ShardMap,
        shards: tuple[int, ...],
        node: NodeId | None,
        features: tuple[str, ...],
        label: str | None,
        version_at: Callable[[int | None], CacheSpec] | None = None,
    ) -> None:
        """`version_at` returns the version of an epoch (None: the newest); without it all read `cache`."""
        self.cache = cache
        self._version_at = version_at
        #: The reader of the version that was asked for last, if it isn't `cache`.
        self._later: CacheReader | None = None
        self.shard_map = shard_map
        self.shards = shards
        self._gives_numbers = ROW in features and numbers_rows(cache)
        wanted = features if label is None else (*features, label)
        self.names = tuple(name for name in wanted if not self._gives_numbers or name != ROW)
        if not self.names:  # a batch has as many rows as its columns
            self.names = (cache.columns[0].name,)
        #: The number of each partition's first row.
        self._first_rows = np.cumsum([0, *(partition.rows for partition in cache.partitions)])
        self._paths = paths
        self._node = node
        #: The columns that are features.
        self.features = features
        self.label = label
        columns = {column.name: column for column in cache.columns}
        self._columns = [columns[name] for name in self.names]
        self._opened: dict[int, _Opened] = {}
        self._prefaulted: set[int] = set()
        self._shards: dict[int, ShardColumns | ShardMemory] = {}
        self.orders = OrdersAhead()
        #: The outcome of `_representative` for each shard, until a partition is opened again.
        self._alike: dict[int, _Opened | None] = {}
        self._sources: dict[int, ShardSource] = {}
        self._ahead: ReadAhead | None = None
        #: The first window of the next epoch of each shard, and the process that reads it.
        self._prepared: dict[int, tuple[int, WindowedColumns]] = {}
        self._opening = threading.Lock()

    @property
    def exceeds_memory(self) -> bool:
        """Whether this task's shards, decompressed, take more than half of the memory."""
        cache, rows = self.cache, sum(self.starts(shard)[-1] for shard in self.shards)
        needed = bytes_in_memory(cache.columns, cache.column_bytes, self.names) if cache.codec else 0
        return needed * rows // max(1, cache.rows) > memory_bytes() // 2

    def read_others(self, names: Sequence[str]) -> CacheReader:
        """Return a reader of other columns of the same rows."""
        place = (self._paths, self.cache, self.shard_map, self.shards, self._node)
        return CacheReader(*place, tuple(names), None)

    def for_shards(self, shards: Sequence[int]) -> CacheReader:
        """Return a reader of the same columns for a task that has these shards."""
        place = (self._paths, self.cache, self.shard_map, tuple(shards), self._node)
        return CacheReader(*place, self.features, self.label, self._version_at)

    @property
    def is_refreshed(self) -> bool:
        """Whether later epochs may read other rows."""
        return self._version_at is not None

    def at_epoch(self, epoch: int | None) -> CacheReader:
        """Return the reader of the rows of an epoch (None: of the newest ones).

        The first call for an epoch may read them from another system. Raises GridError.
        """
        cache = self.cache if self._version_at is None else self._version_at(epoch)
        if cache.version == self.cache.version:
            return self
        if self._later is None or self._later.cache.version != cache.version:
            shard_map = replace(self.shard_map, version=cache.version)
            place = (self._paths, cache, shard_map, self.shards, self._node)
            self._later = CacheReader(*place, self.features, self.label)
        return self._later

    def starts(self, shard: int) -> list[int]:
        """Return the position in the shard of each of its partitions' first row; at the end, its rows."""
        starts = [0]
        for index in self.shard_map.shards[shard]:
            starts.append(starts[-1] + self.cache.partitions[index].rows)
        return starts

    def number_rows(self, origins: Iterable[tuple[int, Rows]]) -> Rows:
        """Return the number of each row in the version, int64, of pairs (partition, rows in it)."""
        numbers = [self._first_rows[index] + rows for index, rows in origins]
        return np.concatenate([np.empty(0, np.int64), *numbers])

    def read_rows(self, shard: int, windows: WindowedColumns | None, plan: ShuffledPlan, step: int) -> Read:
        """Copy the rows of the batch of `step`, in their order, from `windows` of the shard or from the whole
        shard. Raises CorruptPartition."""
        held = self.shard_map.shards[shard]
        origins = tuple([(held[k], rows) for k, rows in plan.rows_of_batch(step)])
        columns = windows or self._map_checked(shard, plan, step)
        arrays = columns.take_batch(plan, step)
        rows = len(arrays[0])
        one = self._representative(shard)
        if one is not None:
            self._count([one], [rows])
        else:
            self._count([self._opened[index] for index, _ in origins], [len(found) for _, found in origins])
        return self._structure(arrays, origins), rows, origins

    def _map_checked(self, shard: int, plan: ShuffledPlan, step: int) -> ShardColumns | ShardMemory:
        """Return the columns of a shard, mapped, with the blocks of a batch found right."""
        few = 2 * plan.rows < self.starts(shard)[-1] if shard not in self._shards else False
        while True:
            columns = self.map_shard(shard, few=few)
            found = columns.find_damage(plan, step) if isinstance(columns, ShardColumns) else None
            if found is None:
                return columns
            self._set_aside(shard, self.shard_map.shards[shard][found[0]], found[1])
            plan.forget_places()

    def _set_aside(self, shard: int, index: int, error: CorruptPartition) -> None:
        """Use a copy no more of which a block is damaged."""
        with self._opening:
            opened = self._opened.get(index)
            if opened is None or str(opened.copy.partition.path) not in str(error):
                return  # another thread was faster
            DAMAGED.set_aside(opened.copy.partition.path, error)
            self._forget(shard, index)

    def _forget(self, shard: int, index: int) -> None:
        """Open a partition again at its next use. The lock is held."""
        self._opened.pop(index, None)
        self._prefaulted.discard(index)
        self._shards.pop(shard, None)
        self._alike.pop(shard, None)

    def _representative(self, shard: int) -> _Opened | None:
        """Return a partition that stands for all of the shard, if they count alike; else None."""
        try:
            return self._alike[shard]
        except KeyError:
            opened = [self._opened[index] for index in self.shard_map.shards[shard]]
            first = opened[0]
            alike = all(o.copy.local == first.copy.local and o.row_bytes == first.row_bytes for o in opened)
            self._alike[shard] = found = first if alike else None
            return found

    def reopen_cut_files(self, shard: int) -> None:
        """Forget the partitions of a shard whose files were cut short: other copies are mapped then.

        The system ends a process that reads a mapped file beyond its end.
        """
        for index in self.shard_map.shards[shard] if self.cache.codec is None else ():
            opened = self._opened.get(index)
            if opened is not None and is_cut_short(opened.copy.partition.path, opened.copy.info):
                with self._opening:
                    self._forget(shard, index)

    def map_shard(self, shard: int, *, few: bool = False) -> ShardColumns | ShardMemory:
        """Return the columns of a shard, mapped into memory. `few`: most rows won't be read.

        Those of a compressed cache are decompressed there, block by block. Raises CorruptPartition.
        """
        if shard not in self._shards and self.cache.codec is not None:
            source = self._find_source(shard)
            with self._opening:
                self._ahead = self._ahead or ReadAhead()
                if shard not in self._shards:
                    self._shards[shard] = ShardMemory(source, self._ahead, memory_bytes() // 2, few=few)
        if shard not in self._shards:
            held = self.shard_map.shards[shard]
            partitions = [self._open(index).copy.partition for index in held]
            with self._opening:
                if shard not in self._shards:
                    self._shards[shard] = ShardColumns(partitions, self.cache.columns, self._columns, few=few)
        return self._shards[shard]

    def read_windows(
        self, shard: int, order: WindowOrder, following: Callable[[], WindowOrder]
    ) -> WindowedColumns:
        """Return the columns of a shard, read in the windows of `order`, then the first one of `following()`.

        Raises CorruptPartition. Close it at the end.
        """
        with self._opening:
            self._ahead = self._ahead or ReadAhead()
            process, prepared = self._prepared.pop(shard, (0, None))
        if process != os.getpid():
            prepared = None  # threads of another process read it, from which this one was forked
        if prepared is not None and prepared.order == order:
            columns = prepared
        else:
            if prepared is not None:
                prepared.close()
            columns = WindowedColumns(self._find_source(shard), order, self._ahead)

        def prepare() -> None:
            first = WindowedColumns(columns.shard, following(), columns.ahead)
            first.begin(0)
            self._prepared[shard] = (os.getpid(), first)

        columns.at_last_window = prepare
        return columns

    def _find_source(self, shard: int) -> ShardSource:
        if shard not in self._sources:
            self._sources[shard] = self._shard_source(shard)
        return self._sources[shard]

    def _shard_source(self, shard: int) -> ShardSource:
        held = self.shard_map.shards[shard]
        unopened = [index for index in held if index not in self._opened]
        announce_opening(self._paths, self.cache, unopened, self._node)
        copies = [self._open(index).copy for index in held]
        # Rows that fit stay in the page cache for the next epoch. Other tasks here may read the other shards.
        direct = self.cache.bytes >= memory_bytes() // 2
        return self._make_source(copies, self.starts(shard), direct=direct)

    def _make_source(
        self, copies: Sequence[Copy], starts: Sequence[int], *, direct: bool = False
    ) -> ShardSource:
        blocks = [open_blocks(self._paths, self.cache, c, self._columns, direct=direct) for c in copies]
        in_memory = self.cache.columns
        if self.cache.codec is not None:  # only what is chosen is decompressed
            in_memory = tuple(column for column in in_memory if column.name in self.names)
        return ShardSource(blocks, np.array(starts), self.cache.block_rows, in_memory, self._columns)

    def read_ranges(
        self, shard: int, ranges: Sequence[tuple[int, int, int]], *, share_texts: bool = False
    ) -> Read:
        """Return rows [start, stop) of the shard's k-th partitions; in place if they are in one.

        With `share_texts` equal texts may be one object, which is faster if they repeat.
        """
        held = self.shard_map.shards[shard]
        columns = None if self.cache.codec is None else self.map_shard(shard)
        if isinstance(columns, ShardMemory):
            found = [columns.take_range(*each) for each in ranges]
            opened = [self._opened[held[k]] for k, _, _ in ranges]
        else:
            opened = [self._open_in_order(shard, held[k], start, stop) for k, start, stop in ranges]
            found = [
                [
                    _slice(source.copy.partition.values[column.name], start, stop, share_texts)
                    for column in self._columns
                ]
                for source, (_, start, stop) in zip(opened, ranges, strict=True)
            ]
        arrays = [
            parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*found, strict=True)
        ]
        origins = tuple((held[k], np.arange(start, stop)) for k, start, stop in ranges)
        lengths = [stop - start for _, start, stop in ranges]
        self._count(opened, lengths)
        return self._structure(arrays, origins), sum(lengths), origins

    def read_positions(self, shard: int, positions: Rows) -> Structure:
        """Copy the rows at some positions of a shard, in their order. Reads little else.

        They come from their blocks alone, which are verified. They don't count as read. Raises
        CorruptPartition.
        """
        starts, held = np.array(self.starts(shard)), self.shard_map.shards[shard]
        parts = np.searchsorted(starts, positions, side="right") - 1
        arrays: list[Any] = [
            np.empty((len(positions), *c.shape), object if is_variable(c) else c.dtype) for c in self._columns
        ]
        for part in np.unique(parts).tolist():
            here = np.flatnonzero(parts == part)
            rows = positions[here] - starts[part]
            for array, found in zip(arrays, self._read_few(held[part], rows), strict=True):
                array[here] = found
        # Partitions come mixed, so rows are counted from the first row of all, which is that of partition 0.
        numbers = self._first_rows[np.array(held)[parts]] + positions - starts[parts]
        return self._structure(arrays, [(0, numbers)])

    def _read_few(self, index: int, rows: Rows) -> list[Any]:
        """Return the given rows of each column of a partition."""
        copy = self._open(index).copy
        if not self.cache.block_rows:
            return [copy.partition.values[name].pick(rows) for name in self.names]
        return self._read_blocks(copy, copy.info.rows, rows)

    def _read_blocks(self, copy: Copy, count: int, rows: Rows) -> list[Any]:
        """Return some of the `count` rows of a partition, of which only their blocks are read."""
        self._ahead = self._ahead or ReadAhead()
        return read_rows(self._make_source([copy], [0, count]), rows, self._ahead)

    def probe(self) -> tuple[Structure, int]:
        """Read (structure, rows) of the first rows of the cache, two at most. They don't count as read.

        If other hosts alone have these, the rows are the first ones of this task's shards.
        """
        filled = [p.index for p in self.cache.partitions if p.rows]
        index = filled[0]
        if find_missing_here(self._paths, self.cache, [index]):
            held = {own for shard in self.shards for own in self.shard_map.shards[shard]}
            index = next((own for own in filled if own in held), index)
        rows = min(2, self.cache.partitions[index].rows)
        some = np.arange(rows)
        return self._structure(self._read_few(index, some), [(index, some)]), rows

    def _open_in_order(self, shard: int, index: int, start: int, stop: int) -> _Opened:
        """Open a partition, all of whose pages are about to be read, like the others of its shard.

        The blocks of rows [start, stop) are right.
        """
        while True:
            opened = self._open(index)
            if opened.checks is None or opened.checks.done:
                break
            size = opened.copy.partition.block_rows
            try:
                opened.checks.check(np.arange(start // size, -(-stop // size)))
                break
            except CorruptPartition as error:
                self._set_aside(shard, index, error)
        if index not in self._prefaulted:
            self._prefaulted.add(index)
            held = self.shard_map.shards[shard]
            opened.copy.partition.prefault(sum(self.cache.partitions[other].bytes for other in held))
        return opened

    def _open(self, index: int) -> _Opened:
        with self._opening:
            opened = self._opened.get(index)
            if opened is None:
                copy = self._open_copy(index)
                partition = copy.partition
                row_bytes = sum(partition.bytes_per_row(name) for name in self.names)
                checks = partition.make_checks(self._columns) if partition.is_marked else None
                opened = self._opened[index] = _Opened(copy, row_bytes, checks)
                self._alike.clear()
            return opened

    def _open_copy(self, index: int) -> Copy:
        return open_version(self._paths, self.cache, index, self._node)

    def _count(self, opened: Sequence[_Opened], lengths: Sequence[int]) -> None:
        local = local_rows = rows = size = 0.0
        for source, length in zip(opened, lengths, strict=True):
            rows += length
            size += length * source.row_bytes
            if source.copy.local:
                local_rows += length
                local += length * source.row_bytes
        READS.count(round(local), round(size - local), int(local_rows), int(rows - local_rows))

    def _structure(self, arrays: list[Any], origins: Iterable[tuple[int, Rows]]) -> Structure:
        """Return a batch of the arrays of `names`, whose rows have these origins."""
        found = dict(zip(self.names, arrays, strict=True))
        label = None if self.label is None else found[self.label]
        if self._gives_numbers:
            found[ROW] = self.number_rows(origins)
        named = {name: found[name] for name in self.features}
        features = found[self.features[0]] if len(self.features) == 1 else named
        return features if self.label is None else (features, label)


def _slice(values: Any, start: int, stop: int, share_texts: bool) -> Any:
    is_of_texts = share_texts and type(values) is TextValues
    return values.slice_shared(start, stop) if is_of_texts else values.slice(start, stop)


# Computes the order of the next epoch while this one is read: sorting many rows takes seconds


LEAST_ROWS = 1 << 20
"""Fewer rows are sorted in some milliseconds, for which no thread is begun. More than MOST_SORTED aren't
sorted."""

_Key = tuple[int, int, int, int]


class OrdersAhead:
    """Orders of shards by (rows, seed, epoch, shard), see `order_rows`. May be used by several threads."""

    def __init__(self) -> None:
        self._threads = ReadingThreads(1)
        #: Orders that were asked for in advance, of the process that asked, and what becomes of each.
        self._prepared: dict[tuple[int, _Key], tuple[Future[None], list[Order]]] = {}
        self._lock = threading.Lock()

    def prepare(self, rows: int, seed: int, epoch: int, shard: int) -> None:
        """Begin to compute an order, unless that is quick. It is kept until `get` is called for it, or
        for another epoch of its shard."""
        key = (os.getpid(), (rows, seed, epoch, shard))
        with self._lock:
            if not LEAST_ROWS <= rows <= MOST_SORTED or key in self._prepared:
                return
            found: list[Order] = []
            future = self._threads.submit(lambda: found.append(order_rows(rows, seed, epoch, shard)))
            self._prepared[key] = (future, found)

    def get(self, rows: int, seed: int, epoch: int, shard: int) -> Order:
        """Return an order."""
        key = (os.getpid(), (rows, seed, epoch, shard))
        with self._lock:
            prepared = self._prepared.pop(key, None)
            for other in [other for other in self._prepared if other[1][3] == shard]:
                self._prepared.pop(other)[0].cancel()
        if prepared is None:
            return order_rows(rows, seed, epoch, shard)
        prepared[0].result()
        return prepared[1][0]


# The columns of a shard that is mapped as a whole, so that rows of all its partitions are taken at once


class ShardColumns:
    """Chosen columns of all partitions of a shard, by the position of a row in the shard."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        all_columns: tuple[Column, ...],
        columns: Sequence[Column],
        *,
        few: bool = False,
    ) -> None:
        """`partitions` are open and not empty. `columns` are chosen out of `all_columns`. `few`: most rows
        won't be read. Raises OSError.
        """
        sizes = [partition.bytes for partition in partitions]
        space = AddressSpace([p.path for p in partitions], sizes, body_alignment(all_columns))
        self._starts = np.concatenate(([0], np.cumsum([p.rows for p in partitions])))
        self._block_rows = max(p.block_rows for p in partitions)
        first_blocks = count_blocks_before(np.diff(self._starts), self._block_rows)
        #: Offsets to the position of a row, by its partition, to count rows as `BlockedValues` does.
        self._shifts = first_blocks * self._block_rows - self._starts
        self._columns = columns
        self._checks = self._make_checks(space, partitions)
        self._fixed = {c.name: self._join(space, partitions, c) for c in columns if not is_variable(c)}
        self._texts = {c.name: [p.values[c.name] for p in partitions] for c in columns if is_variable(c)}
        if not few:
            pieces = list(self._pieces())
            used = sum(size for _, size in pieces)
            # The place of texts isn't known here, and one large piece is mapped faster than many small ones.
            space.prefault(pieces=None if self._texts or 2 * used > sum(sizes) else pieces)

    def _make_checks(self, space: AddressSpace, partitions: Sequence[Partition]) -> list[list[BlockChecks]]:
        """Return what checks each partition: its columns of fixed size if they are mapped together, its texts
        if they are mapped alone. Nothing for files without checksums of blocks."""
        fixed = [column for column in self._columns if not is_variable(column)]
        texts = [column for column in self._columns if is_variable(column)]
        checks: list[list[BlockChecks]] = [[] for _ in partitions]
        for found, partition, offset in zip(checks, partitions, space.offsets.tolist(), strict=True):
            if fixed and partition.is_marked:
                found.append(BlockChecks(partition.layout(fixed), space, offset, len(partition.places)))
            if texts and partition.is_marked:
                found.append(partition.make_checks(texts))
        return checks

    def find_damage(self, plan: ShuffledPlan, step: int) -> tuple[int, CorruptPartition] | None:
        """Check the blocks of the batch of `step` that haven't been. Return the number of a partition that is
        damaged, and how; None: none is."""
        if not self._checks:
            return None
        for k, rows in plan.rows_of_batch(step):
            for checks in self._checks[k]:
                try:
                    # Texts of a partition are put together at their first use.
                    checks.check(rows // self._block_rows if not self._texts else checks.all_blocks)
                except CorruptPartition as error:
                    return k, error
        if all(checks.done for found in self._checks for checks in found):
            self._checks = []
        return None

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (first byte of memory, bytes) for each block of each column of fixed size."""
        for column in self._columns:
            if not is_variable(column):
                size = self._block_rows * row_bytes(column)
                yield from ((start, size) for start in self._fixed[column.name].starts.tolist())

    def _join(self, space: AddressSpace, partitions: Sequence[Partition], column: Column) -> BlockedValues:
        starts = []
        for offset, partition in zip(space.offsets.tolist(), partitions, strict=True):
            values: Any = partition.values[column.name]
            starts.append(offset + values.starts[: -(-partition.rows // self._block_rows)])
        return BlockedValues(space.memory, column, self._block_rows, np.concatenate(starts))

    def _locate(self, positions: Rows, parts: Rows, place: int) -> list[Rows]:
        """Return the places of rows at the given positions: int64 of as many, for each column but texts."""
        rows = positions + self._shifts[parts]
        return [values.locate(rows) for values in self._fixed.values()]

    def take_batch(self, plan: ShuffledPlan, step: int) -> list[npt.NDArray[Any]]:
        """Return the columns of the batch of `step`, in the order of its rows."""
        selection, located = plan.rows_of_batch(step), plan.locate_batch(step, self._locate)
        count = sum(len(rows) for _, rows in selection)
        fixed = iter(located)
        arrays = []
        for column in self._columns:
            out = np.empty((count, *column.shape), object if is_variable(column) else column.dtype)
            if is_variable(column):
                self._take_texts(column.name, selection, out)
            else:
                self._fixed[column.name].take_located(next(fixed), out)
            arrays.append(out)
        return arrays

    def _take_texts(self, name: str, selection: Sequence[tuple[int, Rows]], out: npt.NDArray[Any]) -> None:
        start = 0
        for k, rows in selection:
            self._texts[name][k].take(rows, out[start : start + len(rows)])
            start += len(rows)
