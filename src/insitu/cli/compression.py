"""What `insitu describe` says of compressed columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.cli.console import format_size

if TYPE_CHECKING:
    from insitu.spec import CacheSpec


def describe_sizes(cache: CacheSpec) -> list[str]:
    """Return what follows each column in the list of columns; nothing for caches that aren't compressed."""
    if cache.codec is None:
        return [""] * len(cache.columns)
    return [
        f", {format_size(raw)}"
        + (f" as {format_size(stored)} of {cache.codec}" if stored < raw else ", not compressed")
        for raw, stored in cache.column_bytes
    ]
