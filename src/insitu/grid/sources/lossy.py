"""Whole numbers in text that float64 doesn't hold: 9007199254740993 would become 9007199254740992.

Text is read as float64 if some number of the column has decimals, in this file or in another one, or if one
is too large for int64. Ids among them would be changed in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from insitu.grid.sources.table_layout import Problem, is_list

_MOST_EXACT = float(1 << 53)
"""Below it float64 holds each whole number."""
_MOST_DIGITS = 400
"""No float64 has more before its decimals."""
_WHOLE = r"^\s*[-+]?\d+\s*$"


def list_large(table: Any) -> dict[str, bool]:
    """Return the columns of float64 with numbers so large that some aren't exact, and whether these are in
    lists."""
    found = {}
    for each in table.schema:
        kind, values = each.type, table.column(each.name)
        while is_list(kind):
            kind, values = kind.value_type, pc.list_flatten(values)
        if pa.types.is_float64(kind) and pc.any(pc.greater_equal(pc.abs(values), _MOST_EXACT)).as_py():
            found[each.name] = is_list(each.type)
    return found


def find_lossy(columns: Mapping[str, tuple[Any, bool]]) -> list[Problem]:
    """Return the columns with whole numbers that float64 doesn't hold. `columns`: (their texts, whether these
    are in lists) by name."""
    problems = []
    for name, (texts, in_lists) in columns.items():
        whole = pc.match_substring_regex(texts, _WHOLE)
        wrong = next(filter(_is_lossy, texts.filter(whole).to_pylist()), None)
        if wrong is not None:
            fitting = "float64" if in_lists else "uint64" if _needs_unsigned(texts) else "str"
            text = f"has whole numbers that float64 doesn't hold, such as {wrong.strip():.40}"
            problems.append(Problem(name, text, ("--dtype", f"{name}={fitting}")))
    return problems


def list_long(columns: Mapping[str, tuple[Any, bool]]) -> list[str]:
    """Return which of these columns have whole numbers alone, one a row."""
    return [
        name
        for name, (texts, in_lists) in columns.items()
        if not in_lists and pc.all(pc.match_substring_regex(texts, _WHOLE)).as_py()
    ]


def _is_lossy(text: str) -> bool:
    return len(text) > _MOST_DIGITS or (len(text) > 15 and int(text) != float(text))


def _needs_unsigned(texts: Any) -> bool:
    """Return whether numbers fit into uint64, and not into int64."""
    filled = [text.strip() for text in texts.drop_null().to_pylist() if text.strip()]
    if not all(text.isdecimal() and len(text) <= 20 for text in filled):
        return False
    return (1 << 63) <= max(map(int, filled)) < (1 << 64)


def texts_of_json(text: str, name: str) -> Any:
    """Return the numbers of a key of JSON objects, named as in user.id, as they are written. Those in lists
    follow each other."""
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)
    found: list[str] = []
    place = 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        value, place = decoder.raw_decode(text, place)
        found += _numbers_of(value, name)
    return pa.array(found, pa.large_utf8())


def _numbers_of(value: Any, name: str) -> Iterator[str]:
    """Yield the numbers below the key `name`; none if it isn't there."""
    if isinstance(value, list):
        for each in value:
            yield from _numbers_of(each, name)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key == name:
                yield from _numbers_of(inner, "")
            elif name.startswith(f"{key}."):
                yield from _numbers_of(inner, name.removeprefix(f"{key}."))
    elif isinstance(value, str) and not name:
        yield value
