"""The seam between a group and what moves its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from insitu.errors import ExchangeError
from insitu.exchange.arithmetic import ReduceOp


class MemberLost(Exception):
    """Internal: member `rank` won't arrive; `why` completes the sentence "worker:1 ...". The group makes a
    PeerLost of it. `completed`: whether this process's buffers have wholly been through the operation."""

    def __init__(self, rank: int, why: str, completed: bool = False) -> None:
        super().__init__(rank, why)
        self.rank = rank
        self.why = why
        self.completed = completed


class Mismatch(ExchangeError):
    """Ranks called different operations, or with different sizes or dtypes."""


@dataclass(frozen=True, slots=True)
class Members:
    """Who takes part: `shards[rank]` are the shards that a rank hosts, ascending."""

    rank: int
    shards: tuple[tuple[int, ...], ...]
    num_shards: int

    @property
    def size(self) -> int:
        return len(self.shards)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """What a process joins one generation of a group as.

    `addresses[r]` is the `host:port` of rank r; `shards` are those hosted here, ascending; `tasks` names the
    ranks in messages.
    """

    generation: int
    rank: int
    addresses: tuple[str, ...]
    shards: tuple[int, ...]
    tasks: tuple[str, ...] | None

    def name(self, rank: int) -> str:
        """`worker:0`, or `rank 0`."""
        return self.tasks[rank] if self.tasks and 0 <= rank < len(self.tasks) else f"rank {rank}"


@dataclass(slots=True)
class WaitStats:
    """Seconds that this process has waited for others so far, and who came `last` to the last operation."""

    waiting: float = 0.0
    last: int = -1


@dataclass(frozen=True, slots=True)
class Reduction:
    """One all_reduce or reduce_scatter on one array.

    `rows[i]` is the flat view of local shard i; `result` the flat view that the result goes to (`rows[0]`,
    or the whole array of a process without shards); for a reduce_scatter, `scatter` is the half-open
    interval of elements that this rank wants, written to `result` of that length.
    """

    op: ReduceOp
    dtype: np.dtype[Any]
    length: int
    rows: tuple[np.ndarray, ...]
    result: np.ndarray
    scatter: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        return self.length * self.dtype.itemsize

    def __str__(self) -> str:
        name = "all_reduce" if self.scatter is None else "reduce_scatter"
        return f"{name} {self.op} of {self.dtype.name}[{self.length}]"


RunReduction = Callable[[Sequence[float] | None], bool]
"""Performs a prepared reduction; takes the local shards' weights for a weighted mean. False: all weights
were 0, and nothing was touched."""


class Transport(Protocol):
    """Moves buffers between the members of a group. All members call the same methods in the same order.

    Any method raises MemberLost where a member is lost, and Mismatch where members disagree on what they do.
    """

    @property
    def name(self) -> str: ...

    @property
    def account(self) -> WaitStats: ...

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """`size` zero bytes in the transport's own memory, as uint8[size]. Sizes may differ by rank. With
        `keep`, an array of an earlier transport: that array, its contents and address unchanged."""

    def reduction(self, reduction: Reduction) -> RunReduction:
        """Prepares a reduction once, to be run many times."""

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, what: str) -> None:
        """Copies `rows` (one uint8[n] per local shard) of all members to `out`, uint8[num_shards, n]. `what`
        this is, all must say alike."""

    def broadcast(self, data: np.ndarray, root: int, what: str) -> None:
        """Copies uint8[n] of rank `root` to all others. `what` this is, all must say alike."""

    def close(self) -> None:
        """Leaves. Arrays from `allocate` stay valid as plain memory."""
