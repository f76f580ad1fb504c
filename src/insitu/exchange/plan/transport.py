"""The protocol between a group and the transport that moves its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from insitu.base.errors import ExchangeError
from insitu.exchange.plan.arithmetic import ReduceOp


class MemberLost(Exception):
    """Internal: a member of the group is lost. The group turns it into PeerLost."""

    def __init__(self, rank: int, reason: str, completed: bool = False) -> None:
        super().__init__(rank, reason)
        #: The lost member's rank in the group.
        self.rank = rank
        #: Completes the sentence "worker:1 ...", for example "died".
        self.reason = reason
        #: True if all buffers of this process have been through the whole operation.
        self.completed = completed


class Mismatch(ExchangeError):
    """Ranks called different operations, or with different sizes or dtypes."""

    is_final = True


def mismatch_error(own_rank: int, own: str, other_rank: int, other: str) -> Mismatch:
    """Return the error for two ranks of which one called `own` and the other called `other`."""
    return Mismatch(
        "All ranks must call the same operations in the same order, with the same sizes and dtypes. "
        f"Received: rank {own_rank} called {own}, rank {other_rank} called {other}. "
        "Make both ranks take the same path through the program"
    )


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a group and the shards that each of them hosts."""

    #: The rank of this process.
    rank: int
    #: `shards[rank]` are the shards that a rank hosts, ascending.
    shards: tuple[tuple[int, ...], ...]
    #: The number of shards of all members together.
    num_shards: int

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.shards)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How a process takes part in one generation of a group."""

    #: The number of the generation; each rejoin increases it.
    generation: int
    #: The rank of this process.
    rank: int
    #: `addresses[r]` is the `host:port` that rank r listens on while the group forms.
    addresses: tuple[str, ...]
    #: The shards that this process hosts, ascending.
    shards: tuple[int, ...]
    #: The names of the ranks in messages; None: "rank 0", "rank 1" ...
    tasks: tuple[str, ...] | None

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages: `worker:0`, or `rank 0`."""
        return self.tasks[rank] if self.tasks and 0 <= rank < len(self.tasks) else f"rank {rank}"


@dataclass(slots=True)
class WaitStats:
    """How long this process has waited for others. The transport writes it, the group reads it."""

    #: Seconds that this process has waited for others so far.
    seconds: float = 0.0
    #: The rank that came last to the last operation.
    last_rank: int = -1


@dataclass(frozen=True, slots=True)
class Reduction:
    """One all_reduce or reduce_scatter on one array."""

    #: How rows are combined; see `all_reduce`.
    op: ReduceOp
    #: The dtype of the array.
    dtype: np.dtype[Any]
    #: Elements of a row.
    length: int
    #: `rows[i]` is the flat view of local shard i.
    rows: tuple[np.ndarray, ...]
    #: The flat view that the result goes to: `rows[0]`, or the whole array of a process without shards. For a
    #: reduce_scatter, an array of the length of `scatter`.
    result: np.ndarray
    #: For a reduce_scatter, the half-open interval of elements that goes to this rank; else None.
    scatter: tuple[int, int] | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.length * self.dtype.itemsize

    def __str__(self) -> str:
        name = "all_reduce" if self.scatter is None else "reduce_scatter"
        return f"{name} {self.op} of {self.dtype.name}[{self.length}]"


RunReduction = Callable[[Sequence[float] | None], bool]
"""Performs a prepared reduction. It takes the local shards' weights for a weighted mean. It returns False if
all weights were 0; then it has changed nothing."""


class Transport(Protocol):
    """Moves buffers between the members of a group. All members call the same methods in the same order.

    Each method raises MemberLost if a member is lost, and Mismatch if members call different operations. A
    `label` names the operation; it must be identical on all ranks.
    """

    @property
    def name(self) -> str:
        """The name of the transport, as `Group.transport` shows it."""

    @property
    def wait_stats(self) -> WaitStats:
        """How long this process has waited for others."""

    def allocate(self, size: int, keep: np.ndarray | None = None) -> np.ndarray:
        """Return `size` zero bytes in the transport's own memory, as uint8[size]. Sizes may differ by rank.

        `keep` is an array that an earlier transport allocated: it is returned with its address and contents
        unchanged.
        """

    def prepare(self, reduction: Reduction) -> RunReduction:
        """Prepare a reduction once, so that it can be run many times."""

    def gather(self, rows: Sequence[np.ndarray], out: np.ndarray, label: str) -> None:
        """Copy `rows` (one uint8[n] per local shard) of all members to `out`, uint8[num_shards, n]."""

    def broadcast(self, data: np.ndarray, root: int, label: str) -> None:
        """Copy `data`, uint8[n], of rank `root` into that of all others."""

    def close(self) -> None:
        """Leave the group. Arrays from `allocate` stay valid as plain memory."""
