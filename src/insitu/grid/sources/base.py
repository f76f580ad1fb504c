"""The sources that `import` reads rows from: one Source per file, one module per format."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT
from insitu.grid.sources.column_options import DTYPES, MOST_ROW_VALUES, ColumnOptions
from insitu.grid.sources.file_groups import FileGroup
from insitu.grid.sources.urls import UrlFile

_MALFORMED = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError),
    *(NotImplementedError, EOFError, SyntaxError, SystemError, zlib.error),
)
"""Errors of the formats' libraries for bytes that their writers never write."""


@contextlib.contextmanager
def malformed_as_error(path: Path | UrlFile | FileGroup | str) -> Iterator[None]:
    """Raise SourceError, whatever a malformed file makes a library raise."""
    try:
        yield
    except _MALFORMED as error:
        raise SourceError(
            f"{path} can't be read: it is damaged, or announces what it doesn't hold "
            f"({type(error).__name__}: {str(error)[:200]}). Fetch it again, or write it again"
        ) from error


@dataclass(frozen=True, slots=True)
class CsvOptions:
    """How a text is divided into rows and fields. None: as its beginning shows."""

    #: What separates fields: one character.
    delimiter: str | None = None
    #: The sign before the decimals of a number: `.` or `,`.
    decimal: str | None = None
    #: Whether the first row names the columns.
    header: bool | None = None
    #: The encoding, as Python names it.
    encoding: str | None = None
    #: What encloses fields: one character; empty: nothing does.
    quote: str | None = None
    #: What begins a line that is left out; None: nothing does.
    comment: str | None = None
    #: Fields that stand for no value, of text too; empty: those of Arrow, of numbers alone.
    null_values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a cache, and where its values come from in tables."""

    #: The column of the table; those of structs are named as in user.age.
    source: str
    #: The column of the cache.
    column: Column
    #: What takes the place of missing values; None: NaN, or there may be none.
    fill: str | None = None
    #: How text becomes times, as in `strptime`; "json": values become JSON.
    form: str = ""
    #: Whether it says which values are missing.
    is_mask: bool = False


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The user's additions to the content of the files."""

    #: The name of the column that a .npy holds.
    column: str = "x"
    #: Columns whose rows are lists of different lengths.
    ragged_columns: frozenset[str] = frozenset()
    #: Definitions of columns from features of TFRecord files: NAME:DTYPE[SHAPE]=FEATURE, separated by commas.
    features: str | None = None
    #: Pixels of a side of the images that drawings in JSON lines become; None: drawings aren't looked for.
    render: int | None = None
    #: What is said of the columns.
    fields: ColumnOptions = field(default_factory=ColumnOptions)
    #: How text is divided into fields.
    csv: CsvOptions = field(default_factory=CsvOptions)
    #: The columns of tables, if they have been worked out from all of them; empty: they follow from the file.
    layout: tuple[TableColumn, ...] = ()
    #: The columns of the cache to which rows are appended; empty: they make a cache of their own.
    base: tuple[Column, ...] = ()
    #: Height, width and channels of the rows that images become; None: they can't be read.
    images: tuple[int, int, int] | None = None
    #: Whether images that can't be decoded are passed over.
    skip_damaged: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive rows. Their memory is used for nothing else."""

    #: By name: a NumPy array [rows, *shape] in native byte order; for text an Arrow array of large strings,
    #: for lists of different lengths one of large binaries, with the values of each row.
    columns: Mapping[str, Any]
    #: How many rows.
    rows: int
    #: Bytes of the file that have been read by the end of the block.
    source_bytes: int
    #: The argument of `Source.blocks` to begin with the row that follows.
    next_start: int
    #: The partition that each row has in the system that it comes from; None: it has none.
    partitions: npt.NDArray[np.int64] | None = None
    #: The number of each row among those of all sources; None: they are consecutive.
    numbers: npt.NDArray[np.int64] | None = None
    #: A digest of all rows of each partition of which it has some; None: it isn't known. Equal rows have an
    #: equal one in each reading.
    digests: Mapping[int, str] | None = None


class Source(Protocol):
    """One file of rows. Made with (path, options), which reads the header alone and keeps nothing open.

    Raises SourceError, when it is made or while it is read, if the file is damaged or of another format.
    """

    columns: tuple[Column, ...]
    #: How many rows there are, by the header, or else about so many. A source whose attribute `counts_rows`
    #: is true knows it.
    expected_rows: int

    def __init__(self, path: Path, options: SourceOptions) -> None: ...

    @property
    def format(self) -> str:
        """The name of its format, which each class has."""
        ...

    @property
    def path(self) -> Path | UrlFile | FileGroup | str:
        """The file, or a group of them; of what is no file, its address."""
        ...

    def blocks(self, block_bytes: int, start: int = 0) -> Iterator[Block]:
        """Yield all rows in order, in blocks of about `block_bytes` bytes, one row at least.

        `start` is 0 or the `next_start` of a block: the rows after that one are yielded.
        """
        ...


def check_column(path: object, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Column:
    """Return the column for NumPy values of `dtype`, with `shape` per row. Raises SourceError."""
    if not name:
        raise SourceError(f"{path} has a column without a name")
    if dtype.hasobject:
        raise SourceError(
            f"{path}: column {name!r} holds Python objects (dtype {dtype}), which are never unpickled. Save "
            f"it with a numeric dtype, or as text (dtype '<U...')"
        )
    if dtype.kind == "U":
        if shape:
            raise SourceError(
                f"{path}: column {name!r} holds {shape} texts per row. Text must be one per row"
            )
        return Column(name, TEXT)
    if dtype.name not in DTYPES:
        raise SourceError(
            f"{path}: column {name!r} has dtype {dtype}, which a cache can't hold. Convert it to one of "
            f"{', '.join(DTYPES)} or text"
        )
    if math.prod(shape) > MOST_ROW_VALUES:
        raise SourceError(
            f"{path}: a row of a column has at most {MOST_ROW_VALUES} values. Received: column {name!r} with "
            f"rows of shape {shape}. Split it into several columns, or its rows into several rows"
        )
    if 0 in shape:
        raise SourceError(f"{path}: column {name!r} has rows of shape {shape}, which hold no values")
    return Column(name, dtype.name, shape)


def counts_rows(source: Source) -> bool:
    """Return whether `expected_rows` of a source is exact."""
    return bool(getattr(source, "counts_rows", False))


def rows_per_block(row_bytes: float, block_bytes: int) -> int:
    """Return how many rows of that size make about `block_bytes`; 1 at least."""
    return max(1, int(block_bytes / max(1, row_bytes)))


def native(values: Any) -> Any:
    """Return `values` as an array in the machine's byte order, contiguous."""
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))


def raw_bytes(values: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of a contiguous array, in place."""
    flat: Any = values.reshape(-1).view(np.uint8)
    return memoryview(flat)


def describe_columns(columns: tuple[Column, ...]) -> str:
    """Return such as `x uint8[28,28], label int64`, for messages; of times the type, too."""
    return ", ".join(
        f"{c.name} {'text' if c.dtype == TEXT else c.dtype}{list(c.shape) if c.shape else ''}"
        f"{f' ({c.logical})' if c.logical else ''}"
        for c in columns
    )
