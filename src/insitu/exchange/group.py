"""The group: the methods that a task calls to move buffers."""

from __future__ import annotations

import os
import threading
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

from insitu.base.errors import ExchangeError, InputError, PeerLost, StaleGeneration
from insitu.exchange.plan import (
    GroupConfig,
    MemberLost,
    Members,
    ReduceOp,
    Reduction,
    RunReduction,
    Transport,
    check_reducible,
    check_weights,
    split_by_pages,
)

_MAX_PREPARED = 256
"""Prepared operations that a group keeps at most."""


@dataclass(slots=True)
class OperationStats:
    """The cost of one kind of operation for this process so far. The group writes it."""

    #: The number of calls.
    calls: int = 0
    #: Bytes of the caller's arrays.
    bytes: int = 0
    #: Seconds that this process waited for the others.
    waiting: float = 0.0
    #: Seconds for everything else.
    moving: float = 0.0
    #: By rank: how often it came last. A rank that always does is a straggler.
    last: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class _PreparedOperation:
    """An all_reduce on one array. It doesn't keep the array, and is deleted together with it."""

    #: The array.
    reference: weakref.ref[np.ndarray]
    #: Does the all_reduce once.
    run: RunReduction
    #: True if the array has several rows: then the first one is the result.
    has_rows: bool
    #: Bytes of the array.
    nbytes: int


class _BorrowedBytes:
    """The bytes of an array for NumPy, without a reference to the array."""

    def __init__(self, array: np.ndarray) -> None:
        address = array.__array_interface__["data"]
        self.__array_interface__ = {
            "version": 3,
            "data": address,
            "shape": (array.nbytes,),
            "typestr": "|u1",
        }


FormedGroup = tuple[Members, Transport, Callable[[], None]]
"""The members, the transport between them, and a function to call after the transport is closed."""

FormGroup = Callable[[GroupConfig, float, Callable[[], bool]], FormedGroup]
"""Connects to the others within some seconds, unless the function, which it polls, returns True."""


class Group:
    """The tasks that reduce buffers together. Returned by `insitu.exchange.join`; a context manager.

    All ranks call the same operations in the same order, with arrays of the same size and dtype. Arrays
    must be C-contiguous. A rank that hosts one shard passes an array of any shape; one that hosts L > 1
    shards passes (L, ...), one row per shard in ascending order, of which row 0 receives the result; one
    that hosts none passes an array of a row's shape, which only receives.

    Not for several threads at once, nor for processes forked from the one that joined. After an
    ExchangeError the group is broken: only `rejoin` and `close` can be called. `last_completed` still says
    what the buffers hold.
    """

    def __init__(
        self,
        members: Members,
        transport: Transport,
        on_close: Callable[[], None],
        *,
        config: GroupConfig,
        timeout: float,
        form: FormGroup,
    ) -> None:
        self._timeout = timeout
        self._form = form
        self._buffers: list[np.ndarray] = []
        self._prepared: dict[tuple[int, str], _PreparedOperation] = {}
        self._broken: ExchangeError | None = None
        self._closed = False
        #: Held during an operation.
        self._in_use = threading.Lock()
        #: By operation: "all_reduce", "all_gather", ...
        self.stats: dict[str, OperationStats] = {}
        self._install(config, members, transport, on_close)
        _GROUPS.add(self)

    def _install(
        self, config: GroupConfig, members: Members, transport: Transport, on_close: Callable[[], None]
    ) -> None:
        """Begin a generation."""
        self._config, self._transport, self._on_close = config, transport, on_close
        self._joined = True
        self._wait_stats = transport.wait_stats
        self.rank = members.rank
        self.size = members.size
        self.shards = members.shards[members.rank]
        self.num_shards = members.num_shards
        self.generation = config.generation
        self.transport = transport.name
        self._sequence = -1
        #: Number of the last operation that all buffers of this process have been through completely.
        self.last_completed = -1

    def __repr__(self) -> str:
        return (
            f"<Group rank {self.rank} of {self.size} over {self.transport}, shards {list(self.shards)} of "
            f"{self.num_shards}, generation {self.generation}, {self.last_completed + 1} operations>"
        )

    def task(self, rank: int) -> str:
        """Return the name of a rank in messages: `worker:0`, or `rank 0`."""
        return self._config.name(rank)

    # Operations

    def buffer(self, shape: int | Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Return a new array of zeros in the transport's own memory: reducing it copies nothing.

        All ranks call it together. Shapes may differ by rank: a rank with L > 1 shards passes (L, n). The
        memory is kept until the group is closed and the array is deleted.
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
        """Reduce all shards' rows into every rank's array, in place; return the view with the result.

        The result is `((x_0 + x_1) + x_2) + ...` in shard order, bit for bit, in the array's dtype
        (float16 and bfloat16 are accumulated in float32 and rounded once). A NaN that is computed has one
        pattern, without a sign. "mean" then divides by the number of shards. "weighted_mean" takes `weights`,
        one number >= 0 per local shard: each row is multiplied by w_s / W (float64, rounded to the dtype)
        before it is added. Rows of weight 0 are not read at all, so they may hold anything. If all weights
        are 0, no array is changed.

        Raises InputError for arrays and weights that can't be reduced, PeerLost, ExchangeError.
        """
        prepared = self._prepared.get((id(array), op))
        if prepared is None or prepared.reference() is not array:
            prepared = self._prepare(array, op)
        if weights is not None or op == "weighted_mean":
            weights = self._check_weights(op, weights)
        self._perform("all_reduce", prepared.nbytes, prepared.run, weights)
        return array[0] if prepared.has_rows else array

    def reduce_scatter(
        self, array: np.ndarray, op: ReduceOp = "sum", weights: Sequence[float] | None = None
    ) -> np.ndarray:
        """Return this rank's part of the result of `all_reduce`, as a new flat array; `array` isn't changed.

        The parts of all ranks, one after the other, are the whole result; see `part`.
        """
        rows, _ = self._split(array)
        check_reducible(array.dtype, op)
        length = rows[0].size if rows else array.size
        start, stop = self.part(length, array.dtype)
        result = np.zeros(stop - start, array.dtype)
        checked = self._check_weights(op, weights) if weights is not None or op == "weighted_mean" else None
        reduction = Reduction(op, array.dtype, length, rows, result, (start, stop))
        run = self._transport.prepare(reduction)
        self._perform("reduce_scatter", array.nbytes, run, checked)
        return result

    def part(self, length: int, dtype: DTypeLike, rank: int | None = None) -> tuple[int, int]:
        """Return the half-open interval of a row's elements that `reduce_scatter` returns on `rank`; None: on
        this one."""
        rank = self.rank if rank is None else rank
        return split_by_pages(length, self.size, np.dtype(dtype).itemsize)[rank]

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Return one row per shard, in shard order: a new array of (num_shards, *row shape)."""
        rows, shape = self._split(array)
        out = np.empty((self.num_shards, *shape), array.dtype)
        length = int(np.prod(shape, dtype=np.int64))
        flat = out.reshape(-1).view(np.uint8).reshape(self.num_shards, length * array.dtype.itemsize)
        label = f"all_gather of {array.dtype.name}[{length}]"
        sent = [row.view(np.uint8) for row in rows]
        self._perform("all_gather", array.nbytes, lambda: self._transport.gather(sent, flat, label))
        return out

    def broadcast(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Copy the array of rank `root` into that of every other rank, in place; return `array`."""
        if not 0 <= root < self.size:
            raise InputError(f"root must be a rank in [0, {self.size}). Received: {root}")
        _check_array(array)
        if root != self.rank and not array.flags.writeable:
            raise InputError(
                "broadcast writes to the arrays of all ranks except the root. Received: a read-only array. "
                "Pass a copy"
            )
        data = array.reshape(-1).view(np.uint8)
        label = f"broadcast of {array.dtype.name}[{array.size}] from rank {root}"
        self._perform("broadcast", array.nbytes, lambda: self._transport.broadcast(data, root, label))
        return array

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        rows = [np.empty(0, np.uint8) for _ in self.shards]
        out = np.empty((self.num_shards, 0), np.uint8)
        self._perform("barrier", 0, lambda: self._transport.gather(rows, out, "barrier"))

    # Generations

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
        """Form the group again, with replacements of lost ranks, or with other ranks or shards.

        All ranks must pass the same `generation`, greater than the previous one: survivors to `rejoin`,
        replacements to `join`. It may be called after PeerLost and also without any loss. A rank that still
        works in the previous generation gets PeerLost ("left the group"). Operations are numbered from 0
        again. Buffers keep their addresses and contents.

        Args:
            generation: The new generation.
            addresses: None: the same as before. Another number of addresses makes a group of another size;
                then `tasks` must name the new ranks, if there were names.
            timeout: Seconds for the group to form. None: that of `join`.
            rank: None: the same as before.
            shards: None: the same as before. Shards may move between ranks; `num_shards` stays the same.
            tasks: None: the same as before.
            keep_buffers: True: the buffers become buffers of the new group. Replacements must allocate the
                same ones in the same order as their first operations; the survivors wait for that here.
                False: they become plain memory, which is reduced by copying, and all ranks allocate new
                ones; for ranks whose number of shards has changed. All ranks must pass the same value.
            cancelled: Polled every 20 ms while this process waits for others. Once it returns True (a newer
                generation was announced), the wait ends with StaleGeneration.

        Raises what `join` raises. Then the group stays broken, and `rejoin` may be called again, also with
        the same generation.
        """
        if self._closed:
            raise self._unusable_error()
        if generation <= self.generation:
            raise InputError(
                f"A new generation must be greater than the last, {self.generation}. Received: {generation}"
            )
        config = replace(
            self._config,
            generation=generation,
            addresses=self._config.addresses if addresses is None else tuple(addresses),
            rank=self._config.rank if rank is None else index(rank),
            shards=self._config.shards if shards is None else tuple(map(index, shards)),
            tasks=self._config.tasks if tasks is None else tuple(tasks),
        )
        self._leave()
        self._broken = self._broken or ExchangeError("The last rejoin() failed")
        formed = self._form(config, self._timeout if timeout is None else timeout, cancelled)
        self._install(config, *formed)
        self._broken = None
        if not keep_buffers:
            self._buffers.clear()
        for data in self._buffers:
            self._perform("buffer", 0, partial(self._transport.allocate, data.size, data))

    def leave(self) -> None:
        """Leave this generation at once: ranks that still work in it get PeerLost. `rejoin` may follow."""
        if not self._closed:
            self._broken = self._broken or ExchangeError("leave() was called")
            self._leave()

    def close(self) -> None:
        """Leave the group. Buffers stay valid as plain memory. May be called again."""
        if not self._closed:
            self._closed = True
            self._leave()
            self._buffers.clear()

    def _leave(self) -> None:
        if self._joined:
            self._joined = False
            self._prepared.clear()
            self._transport.close()
            self._on_close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Internals

    def _check_weights(self, op: str, weights: Sequence[float] | None) -> list[float]:
        if op != "weighted_mean" or weights is None:
            raise InputError(
                f'Pass weights if and only if op="weighted_mean". Received: op={op!r}, weights={weights}'
            )
        return check_weights(weights, len(self.shards))

    def _split(self, array: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
        """Return (flat rows of the local shards, shape of a row). Raises InputError."""
        _check_array(array)
        count = len(self.shards)
        if count == 0:
            return (), array.shape
        if count == 1:
            return (array.reshape(-1),), array.shape
        if array.ndim == 0 or array.shape[0] != count:
            raise InputError(
                f"A rank with {count} shards passes an array of {count} rows. Received: shape {array.shape}"
            )
        return tuple(row.reshape(-1) for row in array), array.shape[1:]

    def _prepare(self, array: np.ndarray, op: ReduceOp) -> _PreparedOperation:
        """Prepare an all_reduce on an array, and keep it as long as the array lives."""
        _check_array(array)
        view = np.asarray(_BorrowedBytes(array)).view(array.dtype).reshape(array.shape)
        rows, _ = self._split(view)
        check_reducible(array.dtype, op)
        if not array.flags.writeable:
            raise InputError("all_reduce writes to its array. Received: a read-only array. Pass a copy")
        flat = rows[0] if rows else view.reshape(-1)
        run = self._transport.prepare(Reduction(op, array.dtype, flat.size, rows, flat))
        kept, key = self._prepared, (id(array), op)

        def forget(reference: weakref.ref[np.ndarray]) -> None:
            if key in kept and kept[key].reference is reference:
                del kept[key]

        prepared = _PreparedOperation(weakref.ref(array, forget), run, len(rows) > 1, array.nbytes)
        if len(kept) >= _MAX_PREPARED:
            kept.pop(next(iter(kept)))
        if self._transport.name != "solo" or array.size:
            kept[key] = prepared
        return prepared

    def _perform(self, name: str, nbytes: int, action: Callable[..., Any], *arguments: Any) -> None:
        """Run one operation, count it, and turn MemberLost into PeerLost."""
        if self._closed or self._broken is not None:
            raise self._unusable_error()
        if not self._in_use.acquire(blocking=False):
            raise InputError(
                f"A group is for one thread at a time. Received: {name} while another operation runs. "
                "Have one thread call it, or let each thread join a group of its own"
            )
        self._sequence += 1
        wait_stats = self._wait_stats
        waited, start = wait_stats.seconds, time.perf_counter()
        try:
            action(*arguments)
        except MemberLost as lost:
            if lost.completed:
                self.last_completed = self._sequence
            evicted = lost.rank == self.rank
            self._broken = self._eviction_error(lost) if evicted else self._peer_lost_error(name, lost)
            raise self._broken from lost
        except ExchangeError as error:
            self._broken = error
            raise
        except BaseException as error:  # KeyboardInterrupt, MemoryError: it is unknown how far it went
            self._broken = ExchangeError(f"{name} number {self._sequence} was interrupted by {error!r}")
            raise
        finally:
            self._in_use.release()
        self.last_completed = self._sequence
        stats = self.stats.get(name)
        if stats is None:
            stats = self.stats[name] = OperationStats()
        waited = wait_stats.seconds - waited
        stats.calls += 1
        stats.bytes += nbytes
        stats.waiting += waited
        stats.moving += time.perf_counter() - start - waited
        if wait_stats.last_rank >= 0:  # alone, none comes last
            stats.last[wait_stats.last_rank] += 1

    def _peer_lost_error(self, name: str, lost: MemberLost) -> PeerLost:
        return PeerLost(
            f"{self.task(lost.rank)} {lost.reason} during {name} number {self._sequence} of generation "
            f"{self.generation}; the last operation completed here is number {self.last_completed}. "
            "Call rejoin() with a new generation, or close() the group",
            rank=lost.rank,
            task=self.task(lost.rank),
            operation=name,
            sequence=self._sequence,
            last_completed=self.last_completed,
        )

    def _eviction_error(self, lost: MemberLost) -> StaleGeneration:
        return StaleGeneration(
            f"A rank must take part in all operations of its generation, {self.generation}. Received: "
            f"{self.task(self.rank)} {lost.reason}, and the contents of its buffers are undefined. "
            "Call rejoin() with the generation that the others continue with"
        )

    def _unusable_error(self) -> ExchangeError:
        if self._closed:
            return ExchangeError("The group is closed. Call join() for a new one")
        return ExchangeError(f"The group is broken, call rejoin() or close(): {self._broken}")


_GROUPS: weakref.WeakSet[Group] = weakref.WeakSet()


def _break_in_child() -> None:
    """Break the groups of a forked process: it must not act for the process that joined."""
    for group in list(_GROUPS):
        group._joined = False
        group._broken = ExchangeError("It belongs to the process that joined, not to one forked from it")


os.register_at_fork(after_in_child=_break_in_child)


_PLAIN = (np.ndarray, np.memmap)
"""Arrays that are their values, and nothing else."""


def _check_array(array: np.ndarray) -> None:
    """Raise InputError for an array that the exchange can't move."""
    if isinstance(array, np.ndarray) and type(array) not in _PLAIN:
        raise InputError(
            f"An array must be a plain numpy.ndarray: others have values that wouldn't be moved, such as a "
            f"mask, or shapes of their own. Received: {type(array).__name__}. Pass numpy.asarray(array), and "
            f"what else it holds as an array of its own"
        )
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        given = f"strides {array.strides}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InputError(
            f"An array must be a C-contiguous numpy.ndarray. Received: {given}. Call numpy.ascontiguousarray"
        )
    if array.dtype.hasobject or not array.dtype.isnative:
        raise InputError(
            f"An array must hold numbers in this machine's byte order. Received: dtype {array.dtype.str}"
        )
