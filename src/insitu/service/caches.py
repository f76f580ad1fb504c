"""Caches as `insitu caches --json` and `insitu describe CACHE --json` have them (docs/json.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.spec import CacheSpec


def summarize_cache(cache: CacheSpec) -> dict[str, Any]:
    """Return one cache as `insitu caches --json` prints it."""
    return {
        "name": cache.name,
        "version": cache.version,
        "rows": cache.rows,
        "bytes": cache.bytes,
        "partitions": len(cache.partitions),
        "backups": cache.backups,
        "columns": [{"name": c.name, "dtype": c.dtype, "shape": list(c.shape)} for c in cache.columns],
        "created": cache.created,
    }


def build_cache_report(
    cache: CacheSpec,
    jobs: list[str],
    slow: Mapping[int, Sequence[str]],
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
            "slow": list(slow.get(p.index, ())),
        }
        for p in cache.partitions
    ]
    details = {
        **summarize_cache(cache),
        "kind": "cache",
        "key": cache.key,
        "labels": list(cache.labels),
        "jobs": jobs,
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
