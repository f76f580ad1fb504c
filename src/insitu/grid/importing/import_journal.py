"""How far an import has come, written down beside its staged partitions, so that it can be continued.

Rows of a partition follow from the sources and the plan alone. So after a kill the whole blocks in a staged
file are right, and all that is needed is a place in the sources before the first row that isn't in one. The
journal has such places, each with the rows of every partition before it. The sources are read again from the
newest one whose rows are all in blocks; rows behind it that are in blocks are passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from insitu.base.disk.access import make_file
from insitu.base.disk.durable import seal, unseal
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import Column
from insitu.grid.catalog import is_of_another_host
from insitu.grid.intake import CSV_OPTIONS, FOLDER, ImportPlan
from insitu.options import list_given

JOURNAL_BYTES = 64 << 20
"""Bytes of sources between two places that are written down."""
_FORMAT = 1

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the sources."""

    #: The number of the source among all sources.
    source: int
    #: The position with which its `blocks` begins.
    start: int
    #: The rows of all sources before it.
    rows: int
    #: The bytes of all source files before it.
    bytes: int
    #: The rows of each destination before it.
    counts: tuple[int, ...]


class ImportJournal:
    """The journal of one import, in a file of the staged folder of its first cache."""

    def __init__(self, paths: Paths, plan: ImportPlan) -> None:
        """Begin the journal of the import, or continue it. Raises OSError."""
        first, *others = (paths.staged(name, plan.rows.token).journal for name in plan.rows.names)
        self._path = first
        self._last_bytes = 0
        for path in others:  # a journal marks what must be kept
            make_file(paths.home, path)
        if not self._path.exists():
            make_file(paths.home, self._path)
            self._append({"format": _FORMAT, "plan": fingerprint(plan), "block_rows": plan.rows.block_rows})

    def note(self, source: int, start: int, rows: int, size: int, counts: Counts) -> None:
        """Write down a place, of which `Place` says the parts, if it is far from the last one."""
        if size - self._last_bytes >= JOURNAL_BYTES:
            self._last_bytes = size
            self._append(asdict(Place(source, start, rows, size, tuple(counts.tolist()))))

    def _append(self, state: Any) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(seal(state) + b"\n")

    def find_place(self, adopted: Counts) -> Place:
        """Return the newest place before which each destination has no more rows than `adopted` says."""
        for state in reversed(_read(self._path)[1:]):
            place = Place(**{**state, "counts": tuple(state["counts"])})
            if sum(place.counts) == place.rows and (np.array(place.counts) <= adopted).all():
                return place
        return Place(0, 0, 0, 0, (0,) * len(adopted))


_OF_ROWS = (
    *("columns", "without", "rename", "dtype", "fill", "drop_nulls", "where", "limit", "sample", "row_id"),
    *("tensor", *CSV_OPTIONS),
)
"""Options that say which rows and values files make."""


def _describe_column(column: Column) -> dict[str, Any]:
    described = asdict(column)
    if not column.logical:
        del described["logical"]
    return described


def fingerprint(plan: ImportPlan) -> str:
    """Return the part of a plan that two imports share if one can continue the other's work."""
    rows, files = plan.rows, zip(plan.sources, plan.states, strict=True)
    described = {
        "names": rows.names,
        "fractions": rows.fractions,
        "files": [(str(source.path), asdict(state)) for source, state in files],
        "columns": [_describe_column(column) for column in rows.columns],
        "labels": rows.labels,
        "partitions": rows.partitions,
        "backups": plan.backups,
        "key": rows.key,
        "nodes": plan.topology.nodes,
        "base": None if plan.base is None else plan.base.version,
    }
    if (plan.options.features, plan.options.render) != (None, None):
        described["reading"] = [plan.options.features, plan.options.render]
    if plan.options.images is not None:
        described["images"] = plan.options.images
    if rows.label_from == FOLDER:
        described["label_from"] = FOLDER
    if rows.codec is not None:
        described["codec"] = rows.codec
    if reading := [
        (each.name, str(value)) for each, value in list_given(plan.options) if each.name in _OF_ROWS
    ]:
        described["rows"] = reading
    if plan.reader:
        described["reader"] = plan.reader
    if plan.node_options is not None:  # places are numbers of units then
        described["read_on"] = "nodes"
    return f"{zlib.crc32(json.dumps(described).encode()):08x}"


def find_resumable(paths: Paths, plan: ImportPlan) -> tuple[str, int] | None:
    """Return (token, rows of a block) of a dead import of this user that `plan` can continue, or None.

    The caller holds the lock on the caches. Raises InputError if there is one of another plan.
    """
    name, other = plan.rows.names[0], False
    for root in sorted(paths.staged(name, "").root.parent.glob(f"{paths.staged(name, '').root.name}*")):
        token = root.name.partition("~")[2]
        journal = paths.staged(name, token).journal
        if is_of_another_host(root) or not journal.exists() or root.stat().st_uid != os.getuid():
            continue
        begun = next(iter(_read(journal)), None)
        if begun is not None and begun.get("format") == _FORMAT and begun["plan"] == fingerprint(plan):
            return token, int(begun["block_rows"])
        other = True
    if other:
        raise InputError(
            f"--resume continues with an import of the same files, unchanged since, with the same options. "
            f"Received: an import into {name} with others than the one that was interrupted. Give those "
            f"again, or leave --resume out, which drops what it has done"
        )
    return None


def _read(path: Path) -> Sequence[Any]:
    """Return what a journal says, up to the first line that isn't whole."""
    states: list[Any] = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        for line in path.read_bytes().split(b"\n"):
            states.append(unseal(line))
    return states
