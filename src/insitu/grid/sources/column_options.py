"""What the user says of the columns of a source: which are kept, under which names, as which values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from insitu.base.errors import InputError

COLUMN_OPTIONS = ("tensor", "fill", "arrow", "without", "dtype", "ragged")
"""What is said of the columns of a table of another system to `insitu.dataset`."""
DTYPES = (
    "bool",
    *(f"{u}int{n}" for n in (8, 16, 32, 64) for u in ("u", "")),
    "float16",
    "float32",
    "float64",
)
"""The dtypes of NumPy that a column may have, besides text."""
MOST_ROW_VALUES = 2**31 - 1
"""Values of one row of a column: Arrow counts those of a list of fixed size by 32 bits."""
TEXT_WORDS = ("str", "json")
"""Words of `--dtype` for text: the value itself, or lists, maps and numbers written as JSON."""
TIME_WORDS = ("timestamp", "date")
"""Words of `--dtype` for times, which are kept as whole numbers."""
FILL_WORDS = ("mean", "most", "null")
"""Words of `--fill`: the column's mean, its most frequent value, or 0 beside a column that says where."""
ALL_COLUMNS = "all"
"""Stands for all columns in `--drop-nulls`."""


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """What the user says about the columns of a source. Names are those in the source."""

    #: The columns that are read, in this order; empty: all.
    columns: tuple[str, ...] = ()
    #: Column -> its name in the cache.
    renames: Mapping[str, str] = field(default_factory=dict)
    #: Column -> a dtype, one of TEXT_WORDS or TIME_WORDS, or a format of `strptime`.
    dtypes: Mapping[str, str] = field(default_factory=dict)
    #: Columns whose rows are dropped if they have no value; ALL_COLUMNS: any column.
    drop_nulls: tuple[str, ...] = ()
    #: The condition of the rows that are kept; None: all.
    where: str | None = None
    #: Column -> dtype and shape of a row, for bytes or another array.
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    #: Column -> what takes the place of null, as it was given.
    fills: Mapping[str, str] = field(default_factory=dict)
    #: Columns of bytes that hold Arrow IPC streams.
    arrow: frozenset[str] = frozenset()
    #: Columns, or objects with all their columns, that are left out.
    without: frozenset[str] = frozenset()

    @property
    def given(self) -> tuple[str, ...]:
        """The options that were given, as on the command line."""
        named = {
            "--columns": self.columns,
            "--without": self.without,
            "--rename": self.renames,
            "--dtype": self.dtypes,
            "--fill": self.fills,
            "--drop-nulls": self.drop_nulls,
            "--where": self.where,
            "--tensor": self.tensors,
            "--arrow": self.arrow,
        }
        return tuple(name for name, value in named.items() if value)

    def to_json(self) -> dict[str, list[str]]:
        """Return the options as the command line takes them, those of equal meaning alike."""
        tensors = {
            name: f"{dtype}[{','.join(map(str, shape))}]" for name, (dtype, shape) in self.tensors.items()
        }
        dtypes = {"dtype": sorted(f"{name}={dtype}" for name, dtype in self.dtypes.items())}
        return (dtypes if self.dtypes else {}) | {
            "tensor": sorted(f"{name}={form}" for name, form in tensors.items()),
            "fill": sorted(f"{name}={value}" for name, value in self.fills.items()),
            "arrow": sorted(self.arrow),
            "without": sorted(self.without),
        }


def parse_column_options(given: Mapping[str, Any]) -> ColumnOptions:
    """Return the options of the command line, which are given by name; others are passed over.

    Raises InputError.
    """

    def texts(name: str) -> Sequence[str]:
        return given.get(name) or ()

    return ColumnOptions(
        columns=tuple(texts("columns")),
        renames=_parse_pairs("--rename", "a column and its new name, such as x=age", texts("rename")),
        dtypes=_parse_dtypes(texts("dtype")),
        drop_nulls=tuple(texts("drop_nulls")),
        where=given.get("where"),
        tensors=dict(map(_parse_tensor, texts("tensor"))),
        fills=_parse_pairs("--fill", "a column and a value, such as age=0", texts("fill"), empty=True),
        arrow=frozenset(texts("arrow")),
        without=frozenset(texts("without")),
    )


_IMPORT_OPTIONS = (*COLUMN_OPTIONS, "columns", "rename", "drop_nulls", "where")


def read_columns(options: Any) -> ColumnOptions:
    """Return what options of `insitu import` or `insitu start` say of columns. Raises InputError."""
    return parse_column_options({name: getattr(options, name, None) for name in _IMPORT_OPTIONS})


def _parse_tensor(text: str) -> tuple[str, tuple[str, tuple[int, ...]]]:
    found = re.fullmatch(r"([^=]+)=(\w+)\[(\d+(?:,\d+)*)\]", text.replace(" ", ""))
    shape = tuple(int(length) for length in found[3].split(",")) if found else ()
    if not found or found[2] not in DTYPES or 0 in shape or np.prod(shape, dtype=object) > MOST_ROW_VALUES:
        raise InputError(
            f"--tensor names a column with its dtype and shape, such as image=uint8[28,28], with a dtype out "
            f"of {', '.join(DTYPES)}. Received: {text!r}"
        )
    return found[1], (found[2], shape)


def _parse_pairs(flag: str, rule: str, given: Sequence[str], *, empty: bool = False) -> dict[str, str]:
    pairs = {}
    for text in given:
        # A column's name may have a sign of equality; what stands for it has none, but values to fill with.
        name, equals, value = text.rpartition("=")
        if flag == "--fill" and value not in FILL_WORDS:
            name, equals, value = text.partition("=")
        if not equals or not name.strip() or (not value and not empty):
            raise InputError(f"{flag} names {rule}. Received: {text!r}")
        if name.strip() in pairs:
            raise InputError(f"{flag} names each column once. Received: {name.strip()} twice")
        pairs[name.strip()] = value
    return pairs


def _parse_dtypes(given: Sequence[str]) -> dict[str, str]:
    rule = "a column and its dtype, such as zip=str, or the form of its times, such as day=%d.%m.%Y"
    pairs = _parse_pairs("--dtype", rule, given)
    known = (*DTYPES, *TEXT_WORDS, *TIME_WORDS)
    for name, dtype in pairs.items():
        if "%Z" in dtype:
            raise InputError(
                f"The form of times can't have names of zones, which have several meanings. Received: "
                f"{name}={dtype}. Leave such times as text: {name}=str; %z reads zones such as +0200"
            )
        if dtype not in known and "%" not in dtype:
            raise InputError(
                f"--dtype must be one of {', '.join(known)}, or the form of times, such as %d.%m.%Y. "
                f"Received: {name}={dtype}"
            )
    return pairs
