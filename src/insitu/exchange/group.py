"""The group: what a task calls to move buffers."""

from __future__ import annotations

import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from insitu.errors import ExchangeError, InputError, PeerLost, StaleGeneration
from insitu.exchange.arithmetic import ReduceOp, bounds, check_reducible, check_weights
from insitu.exchange.transport import GroupConfig, MemberLost, Members, Reduction, RunReduction, Transport

_MAX_PREPARED = 256
"""PreparedCall operations kept at most."""


@dataclass(slots=True)
class OperationStats:
    """What one kind of operation has cost this process so far.

    `bytes` of the caller's arrays; `waiting` and `moving` in seconds: for the others to come, and for
    everything else. `last` counts, by rank, who came last: a rank that always does is a straggler.
    """

    calls: int = 0
    bytes: int = 0
    waiting: float = 0.0
    moving: float = 0.0
    last: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class _PreparedOperation:
    """An operation on one array, prepared. `reference` tells whether it is still that array, which it doesn't
    keep: an array that is gone takes its plan along. `several`: the result is only the array's first row."""

    reference: weakref.ref[np.ndarray]
    run: RunReduction
    several: bool
    nbytes: int


class _BorrowedBytes:
    """The bytes of an array, for NumPy, without keeping the array."""

    def __init__(self, array: np.ndarray) -> None:
        address = array.__array_interface__["data"]
        self.__array_interface__ = {
            "version": 3,
            "data": address,
            "shape": (array.nbytes,),
            "typestr": "|u1",
        }


FormedGroup = tuple[Members, Transport, Callable[[], None]]
"""What meeting the others gives: who they are, a transport, what to do after it is closed."""

FormGroup = Callable[[GroupConfig, float, Callable[[], bool]], FormedGroup]
"""Meets the others within some seconds, or until what is asked now and then returns True."""


class Group:
    """Tasks that reduce buffers together. Made by `insitu.exchange.join`; a context manager.

    All ranks call the same operations in the same order, with arrays of the same size and dtype. Arrays
    must be C-contiguous. A rank that hosts one shard passes an array of any shape; one that hosts L > 1
    shards passes (L, ...), one row per shard in ascending order, of which row 0 receives the result; one
    that hosts none passes an array of a row's shape, which only receives.

    Not for several threads at once, nor for processes forked from the one that joined. After an
    ExchangeError the group is broken and only `rejoin` and `close` help; what `last_completed` says of the
    buffers holds.
    """

    def __init__(
        self,
        members: Members,
        transport: Transport,
        on_close: Callable[[], None],
        *,
        seat: GroupConfig,
        timeout: float,
        form: FormGroup,
    ) -> None:
        self._timeout = timeout
        self._form = form
        self._buffers: list[np.ndarray] = []
        self._prepared: dict[tuple[int, str], _PreparedOperation] = {}
        self._broken: ExchangeError | None = None
        self._closed = False
        self.stats: dict[str, OperationStats] = {}
        """By operation: "all_reduce", "all_gather", ..."""
        self._sit_down(seat, members, transport, on_close)
        _GROUPS.add(self)

    def _sit_down(
        self, seat: GroupConfig, members: Members, transport: Transport, on_close: Callable[[], None]
    ) -> None:
        self._seat, self._transport, self._on_close = seat, transport, on_close
        self._seated = True
        self._account = transport.account
        self.rank = members.rank
        self.size = members.size
        self.shards = members.shards[members.rank]
        self.num_shards = members.num_shards
        self.generation = seat.generation
        self.transport = transport.name
        self._sequence = -1
        self.last_completed = -1
        """Number of the last operation that every buffer of this process has wholly been through."""

    def __repr__(self) -> str:
        return (
            f"<Group rank {self.rank} of {self.size} over {self.transport}, shards {list(self.shards)} of "
            f"{self.num_shards}, generation {self.generation}, {self.last_completed + 1} operations>"
        )

    def task(self, rank: int) -> str:
        """What messages call a rank: `worker:0`, or `rank 0`."""
        return self._seat.name(rank)

    # Operations

    def buffer(self, shape: int | Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """A new array of zeros in the transport's own memory: reducing it copies nothing.

        All ranks call it together; shapes may differ by rank (a rank with L shards wants (L, n)). The
        memory is kept until the group is closed and the array gone.
        """
        kind = np.dtype(dtype)
        sizes = tuple(shape) if isinstance(shape, Iterable) else (index(shape),)
        data = np.empty(0, np.uint8)

        def allocate() -> None:
            nonlocal data
            data = self._transport.allocate(int(np.prod(sizes, dtype=np.int64)) * kind.itemsize)

        self._perform("buffer", 0, allocate)
        self._buffers.append(data)
        return data.view(kind).reshape(sizes)

    def all_reduce(
        self, array: np.ndarray, op: ReduceOp = "sum", weights: Sequence[float] | None = None
    ) -> np.ndarray:
        """Reduces all shards' rows into every rank's array, in place; returns the view with the result.

        The result is `((x_0 + x_1) + x_2) + ...` in shard order, bit for bit, in the array's dtype
        (float16 and bfloat16 are accumulated in float32 and rounded once). "mean" then divides by the
        number of shards. "weighted_mean" takes `weights`, one number >= 0 per local shard: each row is
        multiplied by w_s / W (float64, rounded to the dtype) before it is added; rows of weight 0 are
        not read at all, so they may hold anything. Where all weights are 0, nothing is touched.

        Raises InputError for what can't be reduced, PeerLost, ExchangeError.
        """
        plan = self._prepared.get((id(array), op))
        if plan is None or plan.reference() is not array:
            plan = self._prepare(array, op)
        if weights is not None or op == "weighted_mean":
            weights = self._check_weights(op, weights)
        self._perform("all_reduce", plan.nbytes, plan.run, weights)
        return array[0] if plan.several else array

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp = "sum", weights: Sequence[float] | None = None
    ) -> np.ndarray:
        """This rank's part of what `all_reduce` would give, as a new flat array; `array` isn't changed.

        The parts of all ranks, one after the other, are the whole; see `part`.
        """
        rows, _ = self._split(array)
        check_reducible(array.dtype, op)
        length = rows[0].size if rows else array.size
        start, stop = self.part(length, array.dtype)
        result = np.zeros(stop - start, array.dtype)
        checked = self._check_weights(op, weights) if weights is not None or op == "weighted_mean" else None
        reduction = Reduction(op, array.dtype, length, rows, result, (start, stop))
        run = self._transport.reduction(reduction)
        self._perform("reduce_scatter", array.nbytes, run, checked)
        return result

    def part(self, length: int, dtype: DTypeLike, rank: int | None = None) -> tuple[int, int]:
        """The half-open interval of a row's elements that `reduce_scatter` gives to `rank` (this one)."""
        rank = self.rank if rank is None else rank
        return bounds(length, self.size, np.dtype(dtype).itemsize)[rank]

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """One row per shard, in shard order: a new array of (num_shards, *row shape)."""
        rows, shape = self._split(array)
        out = np.empty((self.num_shards, *shape), array.dtype)
        length = int(np.prod(shape, dtype=np.int64))
        flat = _bytes(out.reshape(-1)).reshape(self.num_shards, length * array.dtype.itemsize)
        what = f"all_gather of {array.dtype.name}[{length}]"
        self._perform(
            "all_gather", array.nbytes, lambda: self._transport.gather([_bytes(r) for r in rows], flat, what)
        )
        return out

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Copies the array of rank `root` into every other rank's, in place; returns `array`."""
        if not 0 <= root < self.size:
            raise InputError(f"root must be a rank in [0, {self.size}). Received: {root}")
        _check_movable(array)
        if root != self.rank and not array.flags.writeable:
            raise InputError("broadcast writes to all arrays but that of the root; this one is read-only")
        data = _bytes(array.reshape(-1))
        what = f"broadcast of {array.dtype.name}[{array.size}] from rank {root}"
        self._perform("broadcast", array.nbytes, lambda: self._transport.broadcast(data, root, what))
        return array

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        rows = [np.empty(0, np.uint8) for _ in self.shards]
        out = np.empty((self.num_shards, 0), np.uint8)
        self._perform("barrier", 0, lambda: self._transport.gather(rows, out, "barrier"))

    # Life

    def rejoin(
        self,
        generation: int,
        addresses: Sequence[str] | None = None,
        timeout: float | None = None,
        *,
        rank: int | None = None,
        shards: Sequence[int] | None = None,
        tasks: Sequence[str] | None = None,
        keep_buffers: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Forms the group anew, with whoever takes the places of the lost, or with other places.

        All ranks must come with the same `generation`, greater than the one before: survivors through
        this, replacements through `join`. It may be called after PeerLost and also without any loss; who
        still works in the generation before gets PeerLost ("left the group"). Operations are numbered
        from 0 again.

        `addresses` None: the same as before; another number of them makes a group of another size, and
        then `tasks` must name the new ranks, if there were names. `rank` and `shards` None: the same as
        before; shards may move between ranks, as long as together they are the same `num_shards`.

        Buffers keep their addresses and contents. With `keep_buffers` they are buffers of the new group
        too: who joined anew must make the same ones in the same order as its first operations, which is
        what survivors wait for here. Without, they become plain memory, which is reduced by copying, and
        all ranks make new ones; that is for ranks whose number of shards has changed. All ranks must
        decide alike.

        `timeout` None: that of `join`. `cancelled` is asked every 20 ms while others are waited for; once
        it returns True (a newer generation was announced), the wait ends with StaleGeneration. That error,
        or any that `join` raises, leaves the group broken, and `rejoin` may be called again, also with the
        generation that failed.
        """
        if self._closed:
            raise ExchangeError("The group is closed")
        if generation <= self.generation:
            raise InputError(
                f"A new generation is greater than the last, {self.generation}. Received: {generation}"
            )
        seat = replace(
            self._seat,
            generation=generation,
            addresses=self._seat.addresses if addresses is None else tuple(addresses),
            rank=self._seat.rank if rank is None else index(rank),
            shards=self._seat.shards if shards is None else tuple(map(index, shards)),
            tasks=self._seat.tasks if tasks is None else tuple(tasks),
        )
        self._leave()
        self._broken = self._broken or ExchangeError("It did not form again")
        formed = self._form(seat, self._timeout if timeout is None else timeout, cancelled)
        self._sit_down(seat, *formed)
        self._broken = None
        if not keep_buffers:
            self._buffers.clear()
        for data in self._buffers:
            self._perform("buffer", 0, partial(self._transport.allocate, data.size, data))

    def leave(self) -> None:
        """Leaves this generation at once: who still works in it gets PeerLost. `rejoin` may follow."""
        if not self._closed:
            self._broken = self._broken or ExchangeError("It was left")
            self._leave()

    def close(self) -> None:
        """Leaves the group. Buffers stay valid as plain memory. May be called again."""
        if not self._closed:
            self._closed = True
            self._leave()
            self._buffers.clear()

    def _leave(self) -> None:
        if self._seated:
            self._seated = False
            self._prepared.clear()
            self._transport.close()
            self._on_close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Within

    def _check_weights(self, op: str, weights: Sequence[float] | None) -> list[float]:
        if op != "weighted_mean" or weights is None:
            raise InputError(
                f"weights belong to a weighted_mean, which needs them. Received: {op}, {weights}"
            )
        return check_weights(weights, len(self.shards))

    def _split(self, array: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
        """(flat rows of the local shards, shape of a row). Raises InputError."""
        _check_movable(array)
        count = len(self.shards)
        if count == 0:
            return (), array.shape
        if count == 1:
            return (array.reshape(-1),), array.shape
        if array.ndim == 0 or array.shape[0] != count:
            raise InputError(
                f"A process with {count} shards passes {count} rows. Received an array of {array.shape}"
            )
        return tuple(row.reshape(-1) for row in array), array.shape[1:]

    def _prepare(self, array: np.ndarray, op: ReduceOp) -> _PreparedOperation:
        _check_movable(array)
        lent = np.asarray(_BorrowedBytes(array)).view(array.dtype).reshape(array.shape)
        rows, _ = self._split(lent)
        check_reducible(array.dtype, op)
        if not array.flags.writeable:
            raise InputError("all_reduce writes to its array, which is read-only")
        flat = rows[0] if rows else lent.reshape(-1)
        run = self._transport.reduction(Reduction(op, array.dtype, flat.size, rows, flat))
        plans, key = self._prepared, (id(array), op)

        def forget(reference: weakref.ref[np.ndarray]) -> None:
            if key in plans and plans[key].reference is reference:
                del plans[key]

        plan = _PreparedOperation(weakref.ref(array, forget), run, len(rows) > 1, array.nbytes)
        if len(plans) >= _MAX_PREPARED:
            plans.pop(next(iter(plans)))
        if self._transport.name != "solo" or array.size:
            plans[key] = plan
        return plan

    def _perform(self, name: str, nbytes: int, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs one operation, counts it, and turns a lost member into PeerLost."""
        if self._closed or self._broken is not None:
            raise self._unusable()
        self._sequence += 1
        account = self._account
        waited, start = account.waiting, time.perf_counter()
        try:
            action(*arguments)
        except MemberLost as gone:
            if gone.completed:
                self.last_completed = self._sequence
            self._broken = self._stale(gone) if gone.rank == self.rank else self._peer_lost(name, gone)
            raise self._broken from gone
        except ExchangeError as error:
            self._broken = error
            raise
        except BaseException as error:  # nobody knows how far it went: KeyboardInterrupt, MemoryError
            self._broken = ExchangeError(f"{name} number {self._sequence} was interrupted by {error!r}")
            raise
        self.last_completed = self._sequence
        stats = self.stats.get(name)
        if stats is None:
            stats = self.stats[name] = OperationStats()
        waited = account.waiting - waited
        stats.calls += 1
        stats.bytes += nbytes
        stats.waiting += waited
        stats.moving += time.perf_counter() - start - waited
        stats.last[account.last] += 1

    def _peer_lost(self, name: str, gone: MemberLost) -> PeerLost:
        return PeerLost(
            f"{self.task(gone.rank)} {gone.why} during {name} number {self._sequence} of generation "
            f"{self.generation}; the last operation completed here is number {self.last_completed}",
            rank=gone.rank,
            task=self.task(gone.rank),
            operation=name,
            sequence=self._sequence,
            last_completed=self.last_completed,
        )

    def _stale(self, gone: MemberLost) -> StaleGeneration:
        return StaleGeneration(
            f"{self.task(self.rank)} {gone.why}, which may go on with a generation after {self.generation}; "
            f"what its buffers hold is not to be used"
        )

    def _unusable(self) -> ExchangeError:
        if self._closed:
            return ExchangeError("The group is closed")
        return ExchangeError(f"The group is broken, rejoin or close it: {self._broken}")


_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a process that was forked: it must not speak for the one that joined."""
    for group in list(_GROUPS):
        group._seated = False
        group._broken = ExchangeError("It belongs to the process that joined, not to one forked from it")


os.register_at_fork(after_in_child=_leave_to_parent)


def _check_movable(array: np.ndarray) -> None:
    """Raises InputError."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise InputError("The exchange moves C-contiguous NumPy arrays; see numpy.ascontiguousarray")
    if array.dtype.hasobject or not array.dtype.isnative:
        raise InputError(
            f"The exchange moves numbers in this machine's byte order. Received an array of {array.dtype.str}"
        )


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)
