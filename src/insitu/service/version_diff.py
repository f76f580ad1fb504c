"""Compares two versions of a cache: their columns, and their rows by a key or by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from insitu.base.errors import InputError
from insitu.service.caches import pick_row, plain_row

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from insitu.base.paths import Paths
    from insitu.base.spec import CacheSpec, Column

    Numbers = npt.NDArray[np.int64]
    Hashes = npt.NDArray[np.uint64]

_EXAMPLES = 5
"""Rows of each kind that are given as examples."""
_HASH_BYTES = 256 << 20
"""Bytes of hashes that are compared at once, or those of one column if these are more."""


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Rows of two versions that belong together."""

    #: The numbers of rows in the first version, and of their partners in the second.
    before: Numbers
    after: Numbers
    #: Rows of the first version alone, and of the second alone.
    removed: Numbers
    added: Numbers


class _Progress:
    def __init__(self, rows: int, size: int, show: Callable[[int, int], None] | None) -> None:
        self._rows, self._size, self._show, self._done = max(1, rows), size, show, 0

    def advance(self, rows: int) -> None:
        self._done += rows
        if self._show is not None:
            self._show(self._size * self._done // self._rows, self._size)


def compare_versions(
    paths: Paths,
    before: str,
    after: str,
    key: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return how two versions, such as orders@2 and orders@3, differ, in the form of docs/reference/json.md.

    Rows belong together if column `key` has the same value in both; without a key, if they have the same
    number. Values are compared bit by bit, by hashes of 64 bits. It takes some 50 bytes of memory a row.
    `progress` is called with the bytes done, and those in all. Raises UnknownCache, InputError for a column
    that can't be the key, CorruptPartition, and GridError if partitions are on other hosts alone.
    """
    from insitu.grid import Catalog

    catalog = Catalog(paths)
    old, new = catalog.get_named(before), catalog.get_named(after)
    columns, common = _compare_columns(old, new)
    compared = [name for name in common if name != key]
    if key is not None:
        _check_key(old, new, key, common)
    size = old.raw_bytes + new.raw_bytes
    bar = _Progress((old.rows + new.rows) * max(1, len(common)), size, progress)
    pairs = _pair_rows(paths, old, new, key, bar)
    by_column, changed = _find_changes(paths, old, new, compared, pairs, bar)
    counts = {
        "added": len(pairs.added),
        "removed": len(pairs.removed),
        "changed": len(changed),
        "same": len(pairs.before) - len(changed),
    }
    labels = old.labels != new.labels
    differs = any((*columns.values(), labels, counts["added"], counts["removed"], counts["changed"]))
    return {
        "before": {"name": old.name, "version": old.version, "rows": old.rows},
        "after": {"name": new.name, "version": new.version, "rows": new.rows},
        "equal": not differs,
        "key": key,
        "columns": columns,
        "labels": {"before": list(old.labels), "after": list(new.labels)} if labels else None,
        "rows": counts,
        "changed_by_column": {name: count for name, count in by_column.items() if count},
        "examples": _list_examples(paths, (old, new), compared, key, pairs, changed),
    }


def _compare_columns(old: CacheSpec, new: CacheSpec) -> tuple[dict[str, list[Any]], list[str]]:
    """Return the columns that differ, and the names of those that both have with one type."""
    first = {column.name: column for column in old.columns}
    second = {column.name: column for column in new.columns}
    both = [name for name in first if name in second]
    differ = [name for name in both if first[name] != second[name]]
    columns: dict[str, list[Any]] = {
        "added": [_summarize(column) for name, column in second.items() if name not in first],
        "removed": [_summarize(column) for name, column in first.items() if name not in second],
        "changed": [
            {"name": name, "before": _summarize(first[name]), "after": _summarize(second[name])}
            for name in differ
        ],
    }
    return columns, [name for name in both if name not in differ]


def _summarize(column: Column) -> dict[str, Any]:
    return {"name": column.name, "dtype": column.dtype, "shape": list(column.shape)}


def _check_key(old: CacheSpec, new: CacheSpec, key: str, common: Sequence[str]) -> None:
    kinds = {column.name: column for column in old.columns}
    column = kinds.get(key)
    is_key = column is not None and not column.shape and (column.dtype == "str" or "int" in column.dtype)
    if key not in common or not is_key or (column is not None and column.dtype.endswith("[*]")):
        can_be = [name for name in common if kinds[name].dtype == "str" or "int" in kinds[name].dtype]
        raise InputError(
            f"--key names a column of whole numbers or text that {old.name}@{old.version} and "
            f"{new.name}@{new.version} have with one type. Received: {key}. Choose one of "
            f"{', '.join(can_be) or 'none'}, or leave --key out to compare by position"
        )


def _hash_columns(paths: Paths, cache: CacheSpec, names: Sequence[str], bar: _Progress) -> dict[str, Hashes]:
    """Return the hash of each row's value by column: uint64[rows]."""
    import numpy as np

    from insitu.grid import hash_values, read_blocks

    found = {name: np.empty(cache.rows, np.uint64) for name in names}
    done = 0
    for block in read_blocks(paths, cache, names):
        for name in names:
            found[name][done : done + block.rows] = hash_values(block.values[name])
        done += block.rows
        bar.advance(block.rows * len(names))
    return found


def _pair_rows(paths: Paths, old: CacheSpec, new: CacheSpec, key: str | None, bar: _Progress) -> _Pairs:
    import numpy as np

    if key is None:
        both = np.arange(min(old.rows, new.rows))
        return _Pairs(both, both, np.arange(len(both), old.rows), np.arange(len(both), new.rows))
    keys = [_hash_columns(paths, cache, [key], bar)[key] for cache in (old, new)]
    for cache, hashes in zip((old, new), keys, strict=True):
        distinct = len(np.unique(hashes))
        if distinct < len(hashes):
            raise InputError(
                f"Each row has a key of its own. Received: {len(hashes):,} rows of {cache.name}@"
                f"{cache.version} with {distinct:,} values in column {key}. Name another column by --key, or "
                f"leave it out to compare by position"
            )
    _, first, second = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    order = np.argsort(first)
    alone = [np.ones(cache.rows, bool) for cache in (old, new)]
    alone[0][first], alone[1][second] = False, False
    removed, added = map(np.flatnonzero, alone)
    return _Pairs(first[order], second[order], removed, added)


def _find_changes(
    paths: Paths, old: CacheSpec, new: CacheSpec, names: Sequence[str], pairs: _Pairs, bar: _Progress
) -> tuple[dict[str, int], Numbers]:
    """Return how many pairs differ by column, and the numbers of pairs that differ in any."""
    import numpy as np

    changed = np.zeros(len(pairs.before), bool)
    by_column: dict[str, int] = {}
    at_once = max(1, _HASH_BYTES // max(1, 8 * (old.rows + new.rows)))
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        first, second = (_hash_columns(paths, cache, some, bar) for cache in (old, new))
        for name in some:
            differs = first[name][pairs.before] != second[name][pairs.after]
            by_column[name] = int(np.count_nonzero(differs))
            changed |= differs
    return by_column, np.flatnonzero(changed)


# Examples


def _list_examples(
    paths: Paths,
    versions: tuple[CacheSpec, CacheSpec],
    names: Sequence[str],
    key: str | None,
    pairs: _Pairs,
    changed: Numbers,
) -> list[dict[str, Any]]:
    """Return the first rows that are changed, removed and added, in the form of docs/reference/json.md."""
    some = changed[:_EXAMPLES]
    old, new = versions
    wanted = [*([key] if key else []), *names]
    before = _read_rows(paths, old, wanted, pairs.before[some])
    after = _read_rows(paths, new, wanted, pairs.after[some])
    found = []
    for first, second in zip(pairs.before[some].tolist(), pairs.after[some].tolist(), strict=True):
        one, two = before[first], after[second]
        values = {name: [one[name][1], two[name][1]] for name in names if one[name][0] != two[name][0]}
        found.append(_make_example("changed", first, second, key and one[key][1], values))
    for kind, cache, numbers in (("removed", old, pairs.removed), ("added", new, pairs.added)):
        rows = _read_rows(paths, cache, [key] if key else [], numbers[:_EXAMPLES])
        for number in numbers[:_EXAMPLES].tolist():
            before_it, after_it = (number, None) if kind == "removed" else (None, number)
            found.append(_make_example(kind, before_it, after_it, key and rows[number][key][1], {}))
    return found


def _make_example(
    kind: str, before: int | None, after: int | None, key: Any, values: dict[str, Any]
) -> dict[str, Any]:
    return {"kind": kind, "row_before": before, "row_after": after, "key": key, "values": values}


def _read_rows(
    paths: Paths, cache: CacheSpec, names: Sequence[str], numbers: Numbers
) -> dict[int, dict[str, tuple[bytes | str, Any]]]:
    """Return by number the rows: by column the bytes of the value, and the value as JSON can hold it."""
    import numpy as np

    from insitu.grid import read_numbered

    columns = [column for column in cache.columns if column.name in names]
    found: dict[int, dict[str, tuple[bytes | str, Any]]] = {}
    if not columns:
        return found
    for block in read_numbered(paths, cache, names, np.sort(numbers)):
        for index, number in enumerate(block.numbers.tolist()):
            row = pick_row(columns, block, index)
            plain = plain_row(row)
            found[number] = {
                name: (value if isinstance(value, str) else np.asarray(value).tobytes(), plain[name])
                for name, value in row.items()
            }
    return found
