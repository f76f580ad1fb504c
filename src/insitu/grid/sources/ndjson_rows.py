"""JSON lines read by Python, which is slow: for what Arrow doesn't name, or doesn't read. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa

from insitu.grid.sources.table_layout import Problem, is_list

_encode = json.JSONEncoder(ensure_ascii=False).encode
_INT64, _UINT64 = 1 << 63, 1 << 64
_DTYPES = {bool: "bool", int: "int64", float: "float64", str: "str"}
"""What Python makes of JSON -> the dtype of a column of it."""


def write_texts(text: bytes, names: Collection[str]) -> bytes:
    """Return JSON lines in which the values of keys, named as in user.id, are texts: others than texts as
    JSON has them. Raises ValueError for a line that isn't an object of JSON."""
    rows = []
    for line in filter(bytes.strip, text.splitlines()):
        row = json.loads(line, object_pairs_hook=_make_object)
        for name in names:
            _write_text(row, name)
        rows.append(_encode(row).encode())
    return b"\n".join(rows) + b"\n"


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def _write_text(row: Any, name: str) -> None:
    for key in row if isinstance(row, dict) else ():
        if key != name:
            if name.startswith(f"{key}."):
                _write_text(row[key], name.removeprefix(f"{key}."))
        elif row[key] is not None and not isinstance(row[key], str):
            row[key] = _encode(row[key])


def find_misfit(text: bytes, schema: Any, first_row: int | None) -> list[Problem]:
    """Return what is wrong with the first value that Arrow doesn't read by a schema; empty: nothing is found.

    `first_row`: the number of the first line in its file; None: unknown.
    """
    for number, row in _rows_of(text):
        for name, value, kind in _values_of(row, {each.name: each.type for each in schema}, ""):
            place = "" if first_row is None else f" in row {first_row + number}, counted from 0"
            if kind is None:
                return _describe_new(name, value, place)
            if (fitting := _fitting(value, kind)) is not None:
                has = f"is {kind} by the first lines, and has {_encode(value)[:80]}{place}"
                return [Problem(name, has, ("--dtype", f"{name}={fitting}"))]
    return []


def _describe_new(name: str, value: Any, place: str) -> list[Problem]:
    dtype = _DTYPES.get(type(value), "str")
    text = f"isn't in the first lines{place and f' but{place}'}"
    found = [Problem(name, text, ("--dtype", f"{name}={dtype}"))]
    if dtype != "float64":
        found.append(Problem(name, "misses values", ("--fill", f"{name}=null")))
    return found


def _values_of(row: Any, kinds: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, type) of a row's keys; the type of one that isn't known is None."""
    for key, value in row.items() if isinstance(row, dict) else ():
        kind = kinds.get(key)
        if kind is not None and pa.types.is_struct(kind) and isinstance(value, dict):
            inner = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
            yield from _values_of(value, inner, f"{above}{key}.")
        else:
            yield f"{above}{key}", value, kind


def _fitting(value: Any, kind: Any) -> str | None:
    """Return the dtype of a column that has a value beside those of a type; None: the type has it."""
    if value is None:
        return None
    if pa.types.is_floating(kind):
        return None if type(value) in (int, float) else "str"
    if pa.types.is_integer(kind) and type(value) is int:
        fits = -_INT64 <= value < (_UINT64 if kind == pa.uint64() else _INT64)
        return None if fits else "uint64" if 0 <= value < _UINT64 else "float64"
    if pa.types.is_integer(kind):
        return "float64" if type(value) is float else "str"
    wanted = list if is_list(kind) else bool if pa.types.is_boolean(kind) else str
    return None if type(value) is wanted else "str"


def _rows_of(text: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, object) of the lines that have one, up to the first that isn't JSON."""
    number = 0
    for line in text.splitlines():
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                return
            number += 1
