"""What is said of the columns of sources that aren't files of insitu's own formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.grid.sources.base import DTYPES, MOST_ROW_VALUES

COLUMN_OPTIONS = ("tensor", "fill", "arrow", "without", "ragged")
"""What is said of the columns of a table, on the command line and to `insitu.dataset`."""


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """What the user says about the columns of a table of another system, or of files that Ray Data reads."""

    #: Column -> dtype and shape of a row, for bytes or another array.
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    #: Column -> what takes the place of null, as it was given.
    fills: Mapping[str, str] = field(default_factory=dict)
    #: Columns of bytes that hold Arrow IPC streams.
    arrow: frozenset[str] = frozenset()
    #: Columns, or objects with all their columns, that are left out.
    without: frozenset[str] = frozenset()

    @property
    def given(self) -> str:
        """The options that were given, for messages; empty for none."""
        named = {"--tensor": self.tensors, "--fill": self.fills, "--arrow": self.arrow}
        return " and ".join(name for name, value in (named | {"--without": self.without}).items() if value)

    def to_json(self) -> dict[str, list[str]]:
        """Return the options as the command line takes them, those of equal meaning alike."""
        tensors = {
            name: f"{dtype}[{','.join(map(str, shape))}]" for name, (dtype, shape) in self.tensors.items()
        }
        return {
            "tensor": sorted(f"{name}={form}" for name, form in tensors.items()),
            "fill": sorted(f"{name}={value}" for name, value in self.fills.items()),
            "arrow": sorted(self.arrow),
            "without": sorted(self.without),
        }


def parse_column_options(given: Mapping[str, Sequence[str]]) -> ColumnOptions:
    """Return the options of the command line, which are given by name; others are passed over.

    Raises InputError.
    """
    tensors, fills, arrow, without = (given.get(name, ()) for name in ("tensor", "fill", "arrow", "without"))
    return ColumnOptions(
        dict(map(_parse_tensor, tensors)), dict(map(_parse_fill, fills)), frozenset(arrow), frozenset(without)
    )


def read_columns(options: Any) -> ColumnOptions:
    """Return what options of `insitu import` or `insitu start` say of columns. Raises InputError."""
    return parse_column_options({name: getattr(options, name) for name in COLUMN_OPTIONS})


def _parse_tensor(text: str) -> tuple[str, tuple[str, tuple[int, ...]]]:
    found = re.fullmatch(r"([^=]+)=(\w+)\[(\d+(?:,\d+)*)\]", text.replace(" ", ""))
    shape = tuple(int(length) for length in found[3].split(",")) if found else ()
    if not found or found[2] not in DTYPES or 0 in shape or np.prod(shape, dtype=object) > MOST_ROW_VALUES:
        raise InputError(
            f"--tensor names a column with its dtype and shape, such as image=uint8[28,28], with a dtype out "
            f"of {', '.join(DTYPES)}. Received: {text!r}"
        )
    return found[1], (found[2], shape)


def _parse_fill(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--fill names a column and a value, such as age=0. Received: {text!r}")
    return name.strip(), value
