"""The sources that `import` reads rows from: one Source per file, one module per format."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError
from insitu.base.spec import Column
from insitu.grid.partitions import TEXT
from insitu.grid.sources.file_groups import FileGroup
from insitu.grid.sources.urls import UrlFile

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
class SourceOptions:
    """The user's additions to the content of the files."""

    #: The name of the column that a .npy holds.
    column: str = "x"
    #: Columns to read as float64 in files whose types are only inferred.
    float_columns: frozenset[str] = frozenset()
    #: Columns whose rows are lists of different lengths.
    ragged_columns: frozenset[str] = frozenset()
    #: Definitions of columns from features of TFRecord files: NAME:DTYPE[SHAPE]=FEATURE, separated by commas.
    features: str | None = None
    #: Pixels of a side of the images that drawings in JSON lines become; None: drawings aren't looked for.
    render: int | None = None
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


class Source(Protocol):
    """One file of rows. Made with (path, options), which reads the header alone and keeps nothing open.

    Raises SourceError, when it is made or while it is read, if the file is damaged or of another format.
    """

    format: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    columns: tuple[Column, ...]
    #: How many rows there are, by the header, or else about so many. A source whose attribute `counts_rows`
    #: is true knows it.
    expected_rows: int

    def __init__(self, path: Path, options: SourceOptions) -> None: ...

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
    """Return such as `x uint8[28,28], label int64`, for messages."""
    return ", ".join(
        f"{c.name} {'text' if c.dtype == TEXT else c.dtype}{list(c.shape) if c.shape else ''}"
        for c in columns
    )
