"""Finds replicas that must be equal and aren't, and names where they differ.

Each replica's variables and its position in the data are hashed (XXH3: there against faults, not against
forgery). Two numbers of each replica are compared; the hashes of all variables only if these differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from insitu.base.errors import Diverged
from insitu.exchange import Group

POSITION = "position"
_NAMED = 5
_ALL_BITS = 2**64 - 1
CAUSES = "a backend that is not deterministic, failing memory, or code that runs on one task only may be why."


class Fingerprint:
    """Holds hashes of one replica's values, in the same order on every replica.

    `values` are arrays with names `GROUP/...`; `position` is any number of integers that say where in the
    data the replica is.
    """

    def __init__(self, values: Iterable[tuple[str, NDArray[Any]]], position: Sequence[int] = ()) -> None:
        #: Its position in the data.
        self.position = tuple(int(number) for number in position)
        pairs = [(name, _hash(value)) for name, value in values]
        #: Names of the values, and last that of the position.
        self.names: tuple[str, ...] = (*(name for name, _ in pairs), POSITION)
        #: int64, a hash for each name.
        self.hashes = np.array(
            [*(hashed for _, hashed in pairs), _hash(np.array(self.position, np.int64))], np.int64
        )

    @property
    def summary(self) -> NDArray[np.int64]:
        """int64[2]: how many values there are, and a hash over all."""
        return np.array([len(self.names), _hash(self.hashes)], np.int64)

    def groups(self) -> dict[str, str]:
        """Return a hash of 16 hex digits over all values of each group."""
        found: dict[str, list[int]] = {}
        for name, hashed in zip(self.names, self.hashes.tolist(), strict=True):
            found.setdefault(name.partition("/")[0], []).append(hashed)
        return {name: _hex(_hash(np.array(hashes, np.int64))) for name, hashes in found.items()}


def _hash(value: NDArray[Any]) -> int:
    """Return a hash of 64 bits, as a number that an int64 holds."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def _hex(hashed: int) -> str:
    return f"{hashed & _ALL_BITS:016x}"


def check_equal(group: Group, own: Fingerprint, where: str = "", why: str = CAUSES) -> None:
    """Raise Diverged, in every task, unless all replicas of `group` are equal. Collective.

    `where` completes the sentence "Replicas differ ...", such as "at epoch 2 step 10"; `why` ends it.
    """
    if group.size == 1:
        return
    summaries = _by_rank(group, own.summary)
    if (summaries == summaries[0]).all():
        return
    counts = summaries[:, 0]
    if (counts != counts[0]).any():
        by_task = ", ".join(f"{group.task(r)}: {int(count)}" for r, count in enumerate(counts))
        raise Diverged(
            f"Replicas differ {where}: they have different numbers of variables ({by_task}); {why}"
        )
    raise Diverged(f"{_describe(group, own, _by_rank(group, own.hashes), where)}; {why}")


def _by_rank(group: Group, row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each rank's row, also of ranks that host no shard."""
    rows = np.zeros((group.size, len(row)), np.int64)
    for rank in range(group.size):
        rows[rank] = group.broadcast(row.copy(), rank)
    return rows


def _describe(group: Group, own: Fingerprint, hashes: NDArray[np.int64], where: str) -> str:
    """Return a sentence about replicas that differ: which, in how many values, and their first."""
    reference = hashes[0]
    others = [rank for rank in range(1, group.size) if (hashes[rank] != reference).any()]
    differing = np.flatnonzero((hashes != reference).any(axis=0))
    names = [own.names[i] for i in differing]
    first = int(differing[0])
    sides = "; ".join(
        f"{group.task(rank)} has {_hex(int(hashes[rank, first]))}" for rank in (0, *others[:_NAMED])
    )
    groups = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
    return (
        f"Replicas differ {where}: {', '.join(group.task(r) for r in others)} from {group.task(0)} in "
        f"{len(names)} of {len(own.names)} values ({groups}). The first is {names[0]}: {sides}. Here: "
        f"position {own.position}, {own.groups()}. Training stops, since the replicas would drift apart"
    )
