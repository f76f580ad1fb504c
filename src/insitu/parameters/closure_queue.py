"""Hands out numbered closures to the workers that are free, and keeps what came of them.

Workers that run the same script schedule the same closures under the same numbers. So a worker only needs to
be given a number. The queue is held by the first server: it outlives each worker, and its mirror has it too.

A closure is run at least once. It is handed out again when its worker's connection closes, and when another
incarnation of the worker asks. Its result is that of the run that ends first. Results and failures
are bytes that only workers read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError

Array = NDArray[Any]
KEPT_RESULT_BYTES = 256 << 20
"""Results that are kept, at most; the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who runs a closure."""

    #: Index of the worker.
    worker: int
    #: Number of the worker's process.
    incarnation: int


@dataclass(slots=True)
class JoinRecord:
    """The findings of all workers at one call of `join`, whenever they come to it."""

    #: Closures that were scheduled before the call.
    limit: int
    #: Names the functions of these closures.
    digest: str
    #: Sums over all closures up to `limit`.
    sums: Array
    #: The first closure that failed since the join before; -1: none.
    failed: int


@dataclass(slots=True)
class ClosureQueue:
    """The closures of one script, by number. Changed by the server's thread alone."""

    #: Who runs a closure that hasn't ended.
    taken: dict[int, Holder] = field(default_factory=dict)
    #: The number of the next closure that nobody has had.
    following: int = 0
    #: Numbers that were taken and aren't run any more, in order.
    released: list[int] = field(default_factory=list)
    #: The result of each closure that has ended; None once it was dropped.
    results: dict[int, Array | None] = field(default_factory=dict)
    #: Numbers of the closures that failed.
    failed: set[int] = field(default_factory=set)
    #: Sums of closures' additions to variables that are summed over workers.
    sums: Array = field(default_factory=lambda: np.zeros(0))
    #: The findings at each join, by its number.
    joins: dict[int, JoinRecord] = field(default_factory=dict)
    #: Bytes of the results that are kept.
    kept_bytes: int = 0

    def answer(
        self, worker: int, meta: Mapping[str, Any], arrays: Sequence[Array]
    ) -> tuple[dict[str, Any], Sequence[Array]]:
        """Do what a worker asks for by `meta["do"]`; return the description and the arrays of the reply.

        Raises InputError, and KeyError, TypeError or ValueError for fields that are wrong.
        """
        operation = str(meta["do"])
        if operation == "take":
            limit = int(meta["limit"])
            complete = self.is_complete(limit)
            holder = Holder(worker, int(meta["incarnation"]))
            return {"complete": complete, "number": -1 if complete else self.take(holder, limit)}, ()
        if operation == "release":
            self.release(worker)
            return {}, ()
        number = int(meta["number"])
        if operation == "result":
            kept = self.results.get(number)
            return {"ended": number in self.results, "failed": number in self.failed}, (
                () if kept is None else (kept,)
            )
        if operation == "join":
            record = self.join(number, int(meta["limit"]), str(meta["digest"]))
            return {"failed": record.failed}, (record.sums,)
        if operation != "finish":
            raise ValueError(f"no operation of closures: {operation}")
        result, delta = (np.array(array) for array in arrays)
        self.finish(number, result, delta, failed=meta["failed"] is True)
        return {}, ()

    def take(self, holder: Holder, limit: int) -> int:
        """Return the number of a closure below `limit` that `holder` must run; -1 if there is none.

        A holder that asks again gets the same number: it hasn't received the answer.
        """
        for number, known in list(self.taken.items()):
            if known == holder:
                return number
            if known.worker == holder.worker:
                self._release(number)
        if self.released and self.released[0] < limit:
            number = self.released.pop(0)
        elif self.following < limit:
            number, self.following = self.following, self.following + 1
        else:
            return -1
        self.taken[number] = holder
        return number

    def is_complete(self, limit: int) -> bool:
        """Return whether all closures below `limit` have ended."""
        low = [number for number in (*self.taken, *self.released) if number < limit]
        return self.following >= limit and not low

    def finish(self, number: int, result: Array, delta: Array, *, failed: bool) -> None:
        """Keep what came of a closure, unless another run of it has ended before."""
        if not 0 <= number < self.following:
            raise InputError(f"A closure ends after it was taken. Received: number {number}.")
        if number in self.results:
            return
        self.taken.pop(number, None)
        if number in self.released:
            self.released.remove(number)
        if failed:
            self.failed.add(number)
        else:
            self._add(delta)
        self.results[number] = result
        self.kept_bytes += result.nbytes
        for old in list(self.results):
            if self.kept_bytes <= KEPT_RESULT_BYTES or old == number:
                break
            dropped = self.results[old]
            if dropped is not None:
                self.kept_bytes -= dropped.nbytes
                self.results[old] = None

    def _add(self, delta: Array) -> None:
        if delta.size > self.sums.size:
            self.sums = np.concatenate([self.sums, np.zeros(delta.size - self.sums.size)])
        self.sums[: delta.size] += delta

    def join(self, number: int, limit: int, digest: str) -> JoinRecord:
        """Return what all workers find at join `number`, once all closures below `limit` have ended. Raises
        InputError if other workers have scheduled others."""
        record = self.joins.get(number)
        if record is None:
            before = max((j.limit for j in self.joins.values()), default=0)
            failed = min((n for n in self.failed if before <= n < limit), default=-1)
            record = self.joins[number] = JoinRecord(limit, digest, self.sums.copy(), failed)
        if (record.limit, record.digest) != (limit, digest):
            raise InputError(
                "All workers run the same script, and schedule the same functions in the same order before "
                f"join. Received: {limit} functions, where another worker has scheduled {record.limit}"
                f"{' others' if record.limit == limit else ''}. Let nothing that differs between workers "
                "decide what is scheduled: only what fetch and join return is the same in each."
            )
        return record

    def release(self, worker: int) -> list[int]:
        """Have the closures that `worker` runs be run by others. Return their numbers."""
        numbers = [number for number, holder in self.taken.items() if holder.worker == worker]
        for number in numbers:
            self._release(number)
        return numbers

    def _release(self, number: int) -> None:
        del self.taken[number]
        self.released = sorted([*self.released, number])

    # For mirrors and checkpoints

    def describe(self) -> dict[str, Any]:
        """Return all but the arrays, as JSON."""
        return {
            "taken": [[n, h.worker, h.incarnation] for n, h in self.taken.items()],
            "following": self.following,
            "released": self.released,
            "failed": sorted(self.failed),
            "dropped": [number for number, result in self.results.items() if result is None],
            "joins": [[n, j.limit, j.digest, j.failed] for n, j in self.joins.items()],
        }

    def list_arrays(self) -> dict[str, Array]:
        """Return the arrays, by name."""
        arrays = {f"results/{n}": result for n, result in self.results.items() if result is not None}
        arrays |= {f"joins/{number}": record.sums for number, record in self.joins.items()}
        return {**arrays, "sums": self.sums}

    @classmethod
    def restore(cls, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> ClosureQueue:
        """Return the queue that `describe` and `list_arrays` described."""
        results: dict[int, Array | None] = dict.fromkeys(map(int, meta["dropped"]))
        for name, array in arrays.items():
            if name.startswith("results/"):
                results[int(name.removeprefix("results/"))] = np.array(array)
        return cls(
            taken={int(n): Holder(int(worker), int(inc)) for n, worker, inc in meta["taken"]},
            following=int(meta["following"]),
            released=[int(n) for n in meta["released"]],
            results=dict(sorted(results.items())),
            failed={int(n) for n in meta["failed"]},
            sums=np.array(arrays["sums"]),
            joins={
                int(n): JoinRecord(int(limit), str(digest), np.array(arrays[f"joins/{n}"]), int(failed))
                for n, limit, digest, failed in meta["joins"]
            },
            kept_bytes=sum(r.nbytes for r in results.values() if r is not None),
        )
