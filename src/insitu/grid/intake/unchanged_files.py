"""Files that a version of a table's snapshots shares with the version before, since their rows are the same.

The rows of a table are read, and compared by a digest of each partition. An unchanged one isn't written
again: the new version gets one more name of its file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from insitu.base._version import __version__
from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.intake.row_plan import Earlier, RowPlan
from insitu.grid.partitions import verify_once
from insitu.grid.sources import PartitionedTable, Source

WRITTEN_BY = "written_by"
"""The key of a version's origin that says which programs have written its files."""


def name_writers() -> str:
    """Return the programs that write partitions: equal ones make equal files of equal rows."""
    return f"insitu {__version__}, pyarrow {pa.__version__}"


def find_earlier(before: CacheSpec | None, plan: RowPlan, source: Source) -> Earlier | None:
    """Return what a new version may share with `before`; None unless all is the same that shapes a file
    beside its rows."""
    if before is None or not plan.primaries or not isinstance(source, PartitionedTable):
        return None
    origin = before.origin or {}
    if (origin.get("options"), origin.get(WRITTEN_BY)) != (dict(source.options), name_writers()):
        return None
    shaped = (plan.columns, plan.labels, plan.block_rows, plan.codec, plan.partitions)
    if shaped != (before.columns, before.labels, before.block_rows, None, len(before.partitions)):
        return None
    if before.codec or plan.label_from or plan.row_id or plan.sample is not None:
        return None
    named = {partition: digest for partition, _, digest in origin.get("partitions", ())}
    digests = tuple(named.get(info.index, "") for info in before.partitions)
    if any(info.rows and not digest for info, digest in zip(before.partitions, digests, strict=True)):
        return None
    return Earlier(before.version, before.partitions, digests)


class UnchangedFiles:
    """The files of some nodes of this home that needn't be written. One thread uses it."""

    def __init__(self, paths: Paths, plan: RowPlan, held: Mapping[int, Sequence[NodeId]]) -> None:
        """`held` is as in `PartitionBuilders`: its destinations are meant by their order there."""
        self._paths, self._plan = paths, plan
        self._nodes = list(held.values())
        self._partitions = [plan.destinations[number].partition for number in held]
        self._numbers = {partition: number for number, partition in enumerate(self._partitions)}
        #: By destination: whether it is shared, once that is decided.
        self._found: dict[int, bool] = {}

    def find(self, digests: Mapping[int, str]) -> list[int]:
        """Return the destinations that needn't be written, of the partitions whose rows have these digests.

        Their files are kept for `put_in_place` from then on, whatever becomes of the version before.
        """
        numbers = ((self._numbers.get(partition), digest) for partition, digest in digests.items())
        return [number for number, digest in numbers if number is not None and self.has(number, digest)]

    def has(self, number: int, digest: str) -> bool:
        """Return whether a destination needn't be written. The digest of no rows is empty."""
        earlier = self._plan.earlier
        if number not in self._found:
            partition = self._partitions[number]
            same = earlier is not None and earlier.digests[partition] == digest
            self._found[number] = same and earlier is not None and self._keep(earlier, number)
        return self._found[number]

    def _keep(self, earlier: Earlier, number: int) -> bool:
        """Give the file of each node one more name. Returns False if one can't be used, or isn't right."""
        partition = self._partitions[number]
        with contextlib.suppress(OSError, GridError):
            for node in self._nodes[number]:
                place = (node, self._plan.names[0], earlier.version, partition)
                source, kept = self._paths.partition(*place), self._kept(node, partition)
                kept.unlink(missing_ok=True)
                os.link(source, kept, follow_symlinks=False)
                # A link leads out of the store, or to a file of another member.
                if not stat.S_ISREG(kept.lstat().st_mode):
                    return False
                # The record beside a file that is as it was spares reading it.
                verify_once(kept, earlier.partitions[partition], self._paths.verified(*place))
            return True
        return False

    def put_in_place(self, number: int) -> None:
        """Give a file that was found its name in the new version. Raises OSError."""
        partition = self._partitions[number]
        for node in self._nodes[number]:
            target = self._paths.staged(self._plan.names[0], self._plan.token).partition(node, partition)
            target.parent.mkdir(parents=True, exist_ok=True)
            self._kept(node, partition).replace(target)

    def _kept(self, node: NodeId, partition: int) -> Path:
        """Return the name of a file until it is put in place. The folder of the new version has none such."""
        root = self._paths.staged(self._plan.names[0], self._plan.token).root
        return root / f"kept-{node}-{partition}"
