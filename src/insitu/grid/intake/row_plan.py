"""The plan that all hosts of one import share: columns, and the partition of each row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from insitu.base.errors import InputError
from insitu.base.spec import CODECS, Column, NodeId, PartitionInfo, check_cache_name, check_simple_name
from insitu.base.typed import convert_exactly

MAX_PARTITIONS = 1 << 16
_MOST_NAMES = 64
_MOST_BLOCK_ROWS = 1 << 40


FILENAME, FOLDER = "filename", "folder"
"""What names the classes of rows."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A new partition of one of the caches that an import makes."""

    #: The name of the cache.
    cache: str
    #: The partition's number in the cache.
    partition: int
    #: The nodes that hold it, the primary first.
    owners: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Earlier:
    """The version of the cache whose files the new one shares as far as their rows are the same."""

    #: Its number.
    version: int
    #: Its partitions.
    partitions: tuple[PartitionInfo, ...]
    #: The digest of the rows of each; empty: it has none.
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The part of an import's plan that readers of rows and owners of partitions share."""

    #: The name of the staged folders, which identifies the import; empty until it begins to write.
    token: str
    #: The caches that are made.
    names: tuple[str, ...]
    #: `names[i]` takes about `fractions[i]` of the rows.
    fractions: tuple[float, ...]
    #: New partitions of each cache.
    partitions: int
    #: The columns of all caches, with `label` if names make it.
    columns: tuple[Column, ...]
    #: The names of the classes of column `label`, by number; empty if they have none.
    labels: tuple[str, ...]
    #: The names that make column `label`: FILENAME or FOLDER; empty if none do.
    label_from: str
    #: The column whose hash chooses a row's partition; None: the row's index.
    key: str | None
    #: Rows of each block of a partition but its last.
    block_rows: int
    #: The compression of columns that shrink enough; None: nothing is compressed.
    codec: str | None
    #: Whether what is written leaves the system's cache.
    drop_pages: bool
    #: `primaries[p]`: the node of partition p, if rows bring their partition; else empty.
    primaries: tuple[NodeId, ...]
    #: The new partitions of the first cache, then those of the second, and so on.
    destinations: tuple[Destination, ...]
    #: The part of the rows that is kept, drawn at random; None: all.
    sample: float | None = None
    #: The column that gets the number of each row; None: none does.
    row_id: str | None = None
    #: The version whose files are shared as far as rows are the same; None: there is none.
    earlier: Earlier | None = None

    def held_by(self, node: NodeId) -> list[int]:
        """Return the numbers of the destinations that a node holds."""
        return [number for number, each in enumerate(self.destinations) if node in each.owners]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> RowPlan:
        """Return what `to_json` was called on. Raises InputError for anything else."""
        plan = convert_exactly("A plan of an import", data, cls, InputError)
        for column in plan.columns:
            _check_column(column)
        check_simple_name("An import's token", plan.token)
        for name in plan.names:
            check_cache_name(name)
        for each in plan.destinations:
            if each.cache not in plan.names or not 0 <= each.partition < MAX_PARTITIONS:
                raise InputError(f"A destination is a partition of the import. Received: {each}")
            for node in each.owners:
                check_simple_name("A node's name", node)
        if not 1 <= len(plan.names) == len(plan.fractions) <= _MOST_NAMES:
            raise InputError(f"An import makes 1 to {_MOST_NAMES} caches. Received: {len(plan.names)}")
        if not 1 <= plan.block_rows < _MOST_BLOCK_ROWS or plan.codec not in (None, *CODECS):
            raise InputError(f"Blocks have rows and a codec. Received: {plan.block_rows}, {plan.codec!r:.40}")
        if plan.label_from not in ("", FILENAME, FOLDER):
            raise InputError(f"Names of files or folders make labels. Received: {plan.label_from!r:.40}")
        if not plan.columns or len(plan.destinations) != len(plan.names) * plan.partitions:
            raise InputError("An import has columns, and a destination for each partition")
        if plan.earlier is not None:
            _check_earlier(plan.earlier, plan.partitions)
        return plan


def _check_earlier(earlier: Earlier, partitions: int) -> None:
    if earlier.version < 1 or {len(earlier.partitions), len(earlier.digests)} != {partitions}:
        raise InputError(f"An earlier version has the {partitions} partitions of the import, each a digest")


def _check_column(column: Column) -> None:
    try:
        dtype = np.dtype(column.dtype.removesuffix("[*]")) if column.dtype != "str" else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"A column has a dtype of NumPy. Received: {error!r:.200}") from None
    if (dtype is not None and dtype.hasobject) or any(length < 1 for length in column.shape):
        raise InputError(f"A column has numbers or texts of a shape. Received: {column!r:.200}")
