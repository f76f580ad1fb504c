"""Caches as `insitu caches --json` and `insitu describe CACHE --json` have them (docs/reference/json.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.base.paths import Paths
    from insitu.base.spec import CacheSpec, Column
    from insitu.grid import BlockRows


def summarize_cache(cache: CacheSpec) -> dict[str, Any]:
    """Return one cache as `insitu caches --json` prints it."""
    return {
        "name": cache.name,
        "version": cache.version,
        "rows": cache.rows,
        "bytes": cache.bytes,
        "partitions": len(cache.partitions),
        "backups": cache.backups,
        "columns": [
            {"name": c.name, "dtype": c.dtype, "shape": list(c.shape)}
            | ({"logical": c.logical} if c.logical else {})
            for c in cache.columns
        ],
        "created": cache.created,
    }


def build_cache_report(
    cache: CacheSpec,
    jobs: list[str],
    checks: Sequence[tuple[int, str, Exception | None]] | None,
) -> dict[str, Any]:
    partitions = [
        {
            "index": p.index,
            "rows": p.rows,
            "bytes": p.bytes,
            "checksum": p.checksum,
            "primary": p.owners[0],
            "backups": list(p.owners[1:]),
        }
        for p in cache.partitions
    ]
    details = {
        **summarize_cache(cache),
        "kind": "cache",
        "key": cache.key,
        "labels": list(cache.labels),
        "jobs": jobs,
        "note": cache.note or None,
        "compression": summarize_compression(cache),
        "partition_list": partitions,
    } | ({"origin": cache.origin} if cache.origin else {})
    if checks is not None:
        details["verified"] = [
            {"partition": index, "node": node, "problem": str(problem) if problem else None}
            for index, node, problem in checks
        ]
    return details


def summarize_compression(cache: CacheSpec) -> dict[str, Any] | None:
    """Return the sizes of a compressed cache as `insitu describe --json` prints them; None for others."""
    if cache.codec is None:
        return None
    columns = [
        {
            "name": column.name,
            "codec": cache.codec if stored < raw else None,
            "raw_bytes": raw,
            "bytes": stored,
        }
        for column, (raw, stored) in zip(cache.columns, cache.column_bytes, strict=True)
    ]
    return {"codec": cache.codec, "raw_bytes": cache.raw_bytes, "columns": columns}


# Reads the catalogue once for a process that asks again and again


_TICK = 1_000_000_000
"""Nanoseconds after which a file whose times are the same is taken for unchanged: of two changes within one
tick of the file system's clock, times show one."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Contents of a catalogue."""

    #: The latest version of each cache, by name.
    latest: Sequence[CacheSpec]
    #: These, and older ones that a job uses.
    stored: Sequence[CacheSpec]


class CatalogIndex:
    """Contents of a home's catalogue. Read again when its file has changed. Safe for several threads."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        #: (inode, size, time of the last change) of the file that was read last.
        self._mark: tuple[int, int, int] | None = None
        self._versions = Versions((), ())

    def read(self) -> Versions:
        """Return what the catalogue holds. Raises what `Catalog.stored` raises."""
        from insitu.grid import Catalog

        with self._lock:
            try:
                found = self._paths.catalog.stat()
            except OSError:  # there is none yet, or none that can be read, which the catalogue says
                mark, is_old = None, False
            else:
                mark = found.st_ino, found.st_size, found.st_mtime_ns
                is_old = time.time_ns() - found.st_mtime_ns > _TICK
            if mark is None or mark != self._mark:
                catalog = Catalog(self._paths)
                self._versions = Versions(catalog.caches(), catalog.stored())
                self._mark = mark if is_old else None
            return self._versions


# Rows of a cache to look at: a few, drawn at random, as plain values


MAX_ROWS = 200
_MAX_NUMBERS = 4096
"""Numbers that are given of one value, which is more than a small picture has."""
_MAX_TEXT = 2000


def preview_rows(paths: Paths, name: str, count: int = 24, seed: int = 0) -> dict[str, Any]:
    """Return rows of the latest version in the form of docs/reference/json.md. The same seed gives the same
    rows.

    They come from partitions on this machine. Raises UnknownCache, CorruptPartition, GridError if none is
    here.
    """
    from insitu.grid import sample_rows

    sample = sample_rows(paths, name, max(1, min(count, MAX_ROWS)), seed)
    cache, columns = sample.cache, [column.name for column in sample.cache.columns]
    rows = [plain_row({column: sample.columns[column][i] for column in columns}) for i in range(sample.rows)]
    return {"name": name, "version": cache.version, "seed": seed, "labels": list(cache.labels), "rows": rows}


def read_first_rows(paths: Paths, name: str, count: int) -> tuple[CacheSpec, list[dict[str, Any]]]:
    """Return the version that `name` means, such as orders or orders@3, and its first rows.

    A row has by column an array, a number, or text. Raises UnknownCache, CorruptPartition, and GridError if
    partitions that are needed are on other hosts alone.
    """
    from insitu.grid import Catalog, read_blocks

    cache = Catalog(paths).get_named(name)
    rows = list[dict[str, Any]]()
    for block in read_blocks(paths, cache, [column.name for column in cache.columns], count):
        rows += [pick_row(cache.columns, block, index) for index in range(block.rows)]
    return cache, rows


def pick_row(columns: Sequence[Column], block: BlockRows, index: int) -> dict[str, Any]:
    """Return one row of a block: by column an array, a number, or text."""
    import numpy as np

    row: dict[str, Any] = {}
    for column in columns:
        value = block.values[column.name][index]
        if column.dtype.endswith("[*]"):
            value = np.frombuffer(value.as_buffer(), column.dtype.removesuffix("[*]"))
        row[column.name] = value.as_py() if column.dtype == "str" else value
    return row


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as JSON can hold it, with null in the place of a value of many numbers."""
    import numpy as np

    return {name: to_plain(np.asarray(value)) for name, value in row.items()}


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers as nested lists, text cut to a length. None if it is too
    large."""
    import math

    if value.dtype.kind in "OSU":
        text = value.item()
        return (text.decode(errors="replace") if isinstance(text, bytes) else str(text))[:_MAX_TEXT]
    if value.size > _MAX_NUMBERS:
        return None
    if value.dtype.kind == "f" or value.dtype.kind not in "biu":
        numbers = value.astype("float64")
        if value.ndim == 0:
            return float(numbers) if math.isfinite(numbers) else str(numbers)
        return [to_plain(part) for part in numbers]
    return value.tolist()
