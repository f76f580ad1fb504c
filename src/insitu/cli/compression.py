"""What `insitu describe` says of compressed columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insitu.cli.console import format_size

if TYPE_CHECKING:
    from insitu.spec import CacheSpec


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


def describe_sizes(cache: CacheSpec) -> list[str]:
    """Return what follows each column in the list of columns; nothing for caches that aren't compressed."""
    if cache.codec is None:
        return [""] * len(cache.columns)
    return [
        f", {format_size(raw)}"
        + (f" as {format_size(stored)} of {cache.codec}" if stored < raw else ", not compressed")
        for raw, stored in cache.column_bytes
    ]
