"""An import's plan, worked out from its arguments and the headers of its sources."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from insitu.base.errors import DamagedImages, InputError, SourceError, StorageFull
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, Topology
from insitu.grid.intake.partition_builder import BUFFER_BYTES
from insitu.grid.intake.row_plan import MAX_PARTITIONS, RowPlan
from insitu.grid.intake.source_blocks import FileState, read_blocks
from insitu.grid.intake.unchanged_files import WRITTEN_BY, name_writers
from insitu.grid.layout import HostPlaces, ServerPlaces, find_places
from insitu.grid.partitions import TEXT, is_ragged, is_variable, row_bytes, rows_per_block, text_buffers
from insitu.grid.ray_data import ReaderRequest
from insitu.grid.sources import (
    ColumnOptions,
    CsvOptions,
    PartitionedTable,
    Source,
    SourceOptions,
    TableSource,
    counts_rows,
    describe_columns,
    find_connector,
)
from insitu.options import ImportOptions, list_given

CSV_OPTIONS = tuple(each.name for each in fields(CsvOptions))
"""The options that say how text is divided into fields."""
LEAST_PARTITIONS = 8
"""The default number of partitions of small data, rounded up to the same number on each node."""
PARTITION_BYTES = 1 << 30
"""About the size of a partition of larger data, unless `--partitions` is given."""
OTHER_MAPPINGS = 4000
"""Mappings that a process has beside those of partitions, with a backend loaded, and to spare."""
_SAMPLE_BYTES = 4 << 20
"""Bytes of a source whose texts are looked at before it is imported."""
_HEADERS_BYTES = 1.02
"""Bytes of partitions for each byte of their rows."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """How large rows and all of them together are, as far as it is known before they are read."""

    #: Rows of all sources.
    rows: int
    #: Bytes of a row's texts, all columns together; a mean of some rows.
    text_bytes: float
    #: Bytes of all rows in partitions.
    bytes: int
    #: Whether that is more than a guess.
    is_known: bool


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The sources of one import, and what becomes of their rows."""

    #: What was asked for.
    options: ImportOptions
    #: The source files, in the order of their rows.
    sources: tuple[Source, ...]
    #: The state of each source file when its header was read.
    states: tuple[FileState, ...]
    #: The columns and the partition of each row, and the owners of partitions. All hosts share it.
    rows: RowPlan
    #: Further copies of each partition.
    backups: int
    #: The nodes that partitions are spread over.
    topology: Topology
    #: How large the rows of the sources are.
    sizes: RowSizes
    #: The version that rows are appended to, whose partitions the new one shares; None: none.
    base: CacheSpec | None = None
    #: How nodes read the sources; None: they are read here.
    node_options: SourceOptions | None = None
    #: The reader of Ray Data that reads the sources, with its options; empty: insitu reads them.
    reader: tuple[str, ...] = ()
    #: Which node reads which partition of a table of another system; None: nodes don't.
    hosts: HostPlaces | None = None

    @property
    def is_read_by_nodes(self) -> bool:
        """Whether nodes read the sources, and not this process."""
        return self.node_options is not None or self.hosts is not None

    @property
    def first_partition(self) -> int:
        """The number of the first new partition."""
        return 0 if self.base is None else len(self.base.partitions)

    @property
    def first_row(self) -> int:
        """The index of the first row of the sources, for the hash that chooses its partition."""
        return 0 if self.base is None else self.base.rows

    def sum_column_bytes(self, found: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Return `CacheSpec.column_bytes` of all rows, of those of the rows of the sources."""
        before = self.base.column_bytes if self.base is not None else ((0, 0),) * len(found)
        return tuple((raw + a, stored + b) for (raw, stored), (a, b) in zip(before, found, strict=True))

    @property
    def source_bytes(self) -> int:
        """Bytes of all source files."""
        return sum(state.size for state in self.states)


def refuse_conflicts(options: ImportOptions, columns: ColumnOptions, request: ReaderRequest | None) -> None:
    """Raise InputError for options that a table of another system excludes, or that are for such a table
    alone, and for those that a reader of Ray Data excludes."""
    sources = ", ".join(options.sources)
    if not any(map(find_connector, options.sources)):
        if columns.arrow:
            raise InputError(f"--arrow is for tables of Apache Ignite. Received: {sources}. Leave it out")
        if request is not None:
            _refuse_beside_reader(options, request)
        return
    named = _list_flags(
        options,
        *("append", "resume", "format", "column", "label_from_filename", "label_from_folder", "read_on"),
        *("reader", "images", "skip_damaged"),
        *("columns", "rename", "drop_nulls", "where", "limit", "sample", "row_id", *CSV_OPTIONS),
    )
    typed = [f"{name}={dtype}" for name, dtype in columns.dtypes.items() if dtype != "json"]
    if typed:
        raise InputError(
            f"A table of another system keeps its types; --dtype COLUMN=json makes text of any value. "
            f"Received: --dtype {typed[0]} for {sources}. Leave it out"
        )
    if named:
        raise InputError(
            f"A table of another system is imported as a whole, in its own order. Received: "
            f"{' and '.join(named)} for {sources}. Leave {'it' if len(named) == 1 else 'them'} "
            f"out; with --overwrite the rows of now make the next version"
        )


def _list_flags(options: ImportOptions, *names: str) -> list[str]:
    """Return those of the named options that are given, as on the command line."""
    given = {each.name: each.flag for each, _ in list_given(options)}
    return [given[name] for name in names if name in given]


def _refuse_beside_reader(options: ImportOptions, request: ReaderRequest) -> None:
    """Raise InputError for options that say how insitu reads files, which Ray reads now."""
    ours = ("format", "column", "features", "render", "images", "skip_damaged", *CSV_OPTIONS)
    named = _list_flags(options, *ours)
    if named:
        raise InputError(
            f"--reader says how Ray Data reads the files. Received: {' and '.join(named)} beside it. Leave "
            f"{'it' if len(named) == 1 else 'them'} out, or read the files without --reader"
        )
    labelled = _list_flags(options, "label_from_filename", "label_from_folder")
    if labelled and request.reader.files_per_source > 1:
        raise InputError(
            f"{labelled[0]} takes files of one class each. Received: it beside --reader "
            f"{request.name}, whose files have one row each. Keep the paths by --reader-option "
            f"include_paths=true: their folders name the classes"
        )


def measure_rows(
    sources: Sequence[Source],
    columns: tuple[Column, ...],
    limit: int | None = None,
    sample: float | None = None,
) -> RowSizes:
    """Return how large rows are. The first texts of the largest source are looked at. `limit` and `sample`
    are as in `ImportOptions`."""
    rows = sum(source.expected_rows for source in sources)
    rows = rows if sample is None else max(1, round(rows * sample))
    rows = rows if limit is None else min(rows, limit)
    texts = [column.name for column in columns if is_variable(column)]
    text_bytes = 0.0
    if texts:
        largest = max(sources, key=lambda source: source.expected_rows)
        block = None
        # Damaged images are named when all sources are read, together with all others.
        with (
            contextlib.suppress(DamagedImages),
            contextlib.closing(read_blocks(largest, _SAMPLE_BYTES)) as blocks,
        ):
            block = next(blocks, None)  # of none if no row is kept
        if block is not None:
            for name in texts:
                offsets, _ = text_buffers(block.columns[name])
                text_bytes += float(offsets[-1] - offsets[0]) / max(1, block.rows)
    each = sum(row_bytes(column) for column in columns) + 8 * len(texts) + text_bytes
    known = not texts and sample is None and all(map(counts_rows, sources))
    return RowSizes(rows, text_bytes, int(rows * each * _HEADERS_BYTES), known)


def choose_partitions(
    partitions: int | None,
    topology: Topology,
    size: float,
    least: int = LEAST_PARTITIONS,
    most: int = MAX_PARTITIONS,
) -> int:
    """Return the number of partitions of a cache of about `size` bytes. Raises InputError.

    If none is given they are of about PARTITION_BYTES each, `least` at least and `most` at most, the same
    number on each node.
    """
    if partitions is None:
        nodes = len(topology.nodes)
        wanted = max(least, min(most - nodes, -(-int(size) // PARTITION_BYTES)))
        return -(-wanted // nodes) * nodes
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InputError(
            f"--partitions must be in [1, {MAX_PARTITIONS}]. Received: {partitions}. Leave it out for "
            f"partitions of about 1 GiB"
        )
    return partitions


def check_partitions_in_all(partitions: int, base: CacheSpec | None) -> None:
    """Raise InputError if a cache would get too many partitions by appending to it."""
    held = 0 if base is None else len(base.partitions)
    if held + partitions > MAX_PARTITIONS:
        raise InputError(
            f"A cache has at most {MAX_PARTITIONS} partitions. Received: {partitions} more for one of "
            f"{held}. Import all rows again with --overwrite"
        )
    allowed = read_max_mappings()
    if held + partitions > most_readable(allowed):
        raise InputError(
            f"A process must be allowed to map each partition that it reads twice. Received: "
            f"{held + partitions} partitions, where this system allows {allowed} mappings "
            f"(vm.max_map_count). Import with fewer --partitions, or allow more: `sysctl -w "
            f"vm.max_map_count={2 * MAX_PARTITIONS + OTHER_MAPPINGS}`"
        )


def read_max_mappings() -> int | None:
    """Return how many mappings the system allows a process; None if it doesn't say."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    return None


def most_readable(mappings: int | None) -> int:
    """Return how many partitions a process can read that may have so many mappings; None: any number."""
    if mappings is None:
        return MAX_PARTITIONS
    return max(1, min(MAX_PARTITIONS, (mappings - OTHER_MAPPINGS) // 2))


def fits_into_memory(sizes: RowSizes) -> bool:
    """Return whether the system's cache may keep what is written, beside all else, for those who read it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sizes.bytes <= memory // 4


def choose_block_rows(
    columns: tuple[Column, ...], sizes: RowSizes, destinations: int, *, is_repeated: bool = False
) -> int:
    """Return the rows of a block, so that the blocks of all destinations fit into memory together.

    `is_repeated`: the same sources are read again and again. Then it is a power of two if texts vary, so that
    it stays the same if they become a little longer, and files of equal rows with it.
    """
    rows = rows_per_block(columns, sizes.text_bytes, limit=BUFFER_BYTES // destinations)
    if is_repeated and any(map(is_variable, columns)):
        return 1 << (rows.bit_length() - 1)
    return rows


def check_key(key: str | None, columns: tuple[Column, ...]) -> None:
    """Raise InputError unless `key` is None or a column whose hash can choose partitions."""
    if key is None:
        return
    column = next((c for c in columns if c.name == key), None)
    if column is None:
        raise InputError(f"--key {key} is no column of the sources, which have {describe_columns(columns)}")
    if (
        column.shape
        or is_ragged(column)
        or (column.dtype != TEXT and np.dtype(column.dtype).kind not in "iub")
    ):
        raise InputError(
            f"--key must be a column of whole numbers or text, one a row. Received: {key} of "
            f"{column.dtype}{list(column.shape) if column.shape else ''}"
        )


def check_room(paths: Paths, sizes: RowSizes, copies: float, codec: str | None, dead: int = 0) -> None:
    """Raise StorageFull if the partitions won't fit beside what is there. A guess counts half, and what will
    be compressed. `copies`: how many of each partition, on average. `dead` bytes are removed before."""
    folder = _nearest_folder(paths.home)
    need, free = int(sizes.bytes * copies), shutil.disk_usage(folder).free + dead
    if free < (need if sizes.is_known and codec is None else need // 2):
        several = f", {copies:g} copies of each" if copies > 1 else ""
        raise StorageFull(
            f"No room is left for {folder}: an import must fit there beside what is there. Received: about "
            f"{need} bytes of {sizes.rows} rows{several}, where {free} are free. Free some space, such as of "
            f"caches that aren't used any more, or put INSITU_HOME on a larger device"
        )


def bytes_by_node(plan: ImportPlan) -> dict[NodeId, int]:
    """Return about how many bytes come into the store of each node. A guess counts half, and what will be
    compressed."""
    rows = plan.rows
    copies = Counter(owner for each in rows.destinations[: rows.partitions] for owner in each.owners)
    is_exact = plan.sizes.is_known and rows.codec is None
    size = plan.sizes.bytes if is_exact else plan.sizes.bytes // 2
    return {node: size * count // rows.partitions for node, count in copies.items()}


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def find_primaries(source: Source, topology: Topology, after: CacheSpec | None) -> tuple[NodeId, ...]:
    """Return the node beside the primary server of each partition of a table; empty if the servers don't say
    which that is. Partitions stay on their nodes of the version `after`.

    Raises SourceError if there are other partitions than in `after`.
    """
    places = _find_places(source)
    if after is not None:
        found = len(places.primaries) if places else 0
        if found != len(after.partitions):
            raise SourceError(
                f"A table must keep its partitions while a job trains on it. Received: {found} of "
                f"{source.path}, after {len(after.partitions)}. Start another job"
            )
        return tuple(info.owners[0] for info in after.partitions)
    return places.owners(topology.nodes) if places else ()


def _find_places(source: Source) -> ServerPlaces | None:
    """Return the server of each partition of a table; None if there is none, or it isn't known."""
    if not isinstance(source, PartitionedTable) or not source.primaries:
        return None
    return find_places(source.primaries, source.endpoints)


def describe_origin(plan: ImportPlan) -> Mapping[str, Any] | None:
    """Return `CacheSpec.origin` of what was read. If partitions are those of a table, it has the server of
    each."""
    source = next((source for source in plan.sources if isinstance(source, TableSource)), None)
    if source is None or source.origin is None:
        return None
    origin = source.origin | {WRITTEN_BY: name_writers()}
    places = plan.hosts.places if plan.hosts else _find_places(source) if plan.rows.primaries else None
    if places is None:
        return origin
    return origin | {"servers": list(places.servers), "primaries": list(places.primaries)}
