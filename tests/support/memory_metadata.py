"""A metadata store in this process, which can lose answers and hold calls back."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence

from insitu.base.errors import StoreUnavailable
from insitu.metadata import (
    MAX_OPERATIONS,
    MAX_VALUE_BYTES,
    Change,
    Compare,
    Operation,
    Outcome,
    Put,
    Record,
)


class MemoryMetadata:
    """Keys with revisions. `before` is called with the name of each call, before it is done."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.revision = 0
        self.before: Callable[[str], None] = lambda call: None
        self.transactions: list[tuple[Operation, ...]] = []
        """The operations of those that were made."""
        self._keys: list[str] = []
        self._made: dict[str, Outcome] = {}
        self._leases = 0
        self._lock = threading.RLock()

    def get(self, keys: Sequence[str]) -> tuple[dict[str, Record], int]:
        self.before("get")
        with self._lock:
            return {key: self.records[key] for key in keys if key in self.records}, self.revision

    def range(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[list[Record], int]:
        self.before("range")
        with self._lock:
            found = []
            start = max(bisect.bisect_left(self._keys, prefix), bisect.bisect_right(self._keys, after))
            for key in self._keys[start:]:
                if not key.startswith(prefix) or len(found) >= limit:
                    break
                found.append(self.records[key])
            return found, self.revision

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        self.before("transact")
        assert len(compare) <= MAX_OPERATIONS and len(operations) <= MAX_OPERATIONS
        assert len({each.key for each in operations}) == len(operations)
        with self._lock:
            if id in self._made:
                return self._made[id]
            found = tuple(self.records[c.key] for c in compare if c.key in self.records)
            if not all(each.holds(self.records.get(each.key)) for each in compare):
                return Outcome(False, self.revision, found)
            self.revision += 1
            for operation in operations:
                self._apply(operation)
            self.transactions.append(tuple(operations))
            self._made[id] = Outcome(True, self.revision)
            return self._made[id]

    def _apply(self, operation: Operation) -> None:
        key = operation.key
        if isinstance(operation, Put):
            assert len(operation.value) <= MAX_VALUE_BYTES
            if key not in self.records:
                bisect.insort(self._keys, key)
            self.records[key] = Record(key, operation.value, self.revision, operation.lease)
        elif self.records.pop(key, None) is not None:
            self._keys.remove(key)

    def list_made(self) -> list[str]:
        return list(self._made)

    def watch(self, prefix: str, revision: int) -> Iterator[list[Change]]:
        raise NotImplementedError

    def grant(self, seconds: float) -> int:
        with self._lock:
            self._leases += 1
            return self._leases

    def keep(self, lease: int) -> bool:
        return True

    def revoke(self, lease: int) -> None:
        pass

    def close(self) -> None:
        pass


class LosingMetadata(MemoryMetadata):
    """One that makes the transactions of some ids, and doesn't answer them: once each."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.is_losing: Callable[[str], bool] = lambda id: False

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        outcome = super().transact(compare, operations, id)
        if self.is_losing(id):
            self.lost.append(id)
            raise StoreUnavailable("the answer was lost")
        return outcome
