"""What a store of metadata is, in memory and pure: what conformance and histories are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from insitu.metadata import Operation, Put


@dataclass
class MetadataModel:
    """Keys with values, and when each was written, counted in changes of this model."""

    #: The time, which the test moves.
    now: float = 0.0
    #: By key: its value, the number of the change that has written it, and its lease.
    records: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)
    #: By lease: how long it lasts, and when it ends.
    leases: dict[int, tuple[float, float]] = field(default_factory=dict)
    #: Ids of transactions that were made.
    made: dict[str, int] = field(default_factory=dict)
    #: The changes, in order.
    log: list[list[tuple[str, bytes | None]]] = field(default_factory=list)

    def expire(self) -> None:
        for lease in sorted(
            (lease for lease, (_, end) in self.leases.items() if end <= self.now), key=self._end
        ):
            self.revoke(lease)

    def _end(self, lease: int) -> tuple[float, int]:
        return self.leases[lease][1], lease

    def transact(
        self, compare: Sequence[tuple[str, int]], operations: Sequence[Operation], id: str
    ) -> bool | None:
        """Return whether it is made; None: it names a lease that has ended. `compare` has numbers of
        changes."""
        self.expire()
        if id in self.made:
            return True
        if any(self.number_of(key) != number for key, number in compare):
            return False
        if any(isinstance(each, Put) and each.lease and each.lease not in self.leases for each in operations):
            return None
        self.made[id] = self._change(
            [(o.key, o.value, o.lease) if isinstance(o, Put) else (o.key, None, 0) for o in operations]
        )
        return True

    def number_of(self, key: str) -> int:
        return self.records[key][1] if key in self.records else 0

    def _change(self, changes: Sequence[tuple[str, bytes | None, int]]) -> int:
        number = len(self.log) + 1
        told: list[tuple[str, bytes | None]] = []
        for key, value, lease in changes:
            if value is not None:
                self.records[key] = (value, number, lease)
            elif self.records.pop(key, None) is None:
                continue
            told.append((key, value))
        self.log.append(told)
        return number

    def grant(self, lease: int, seconds: float) -> None:
        self.leases[lease] = (seconds, self.now + seconds)

    def keep(self, lease: int) -> bool:
        self.expire()
        if lease not in self.leases:
            return False
        self.grant(lease, self.leases[lease][0])
        return True

    def revoke(self, lease: int) -> None:
        keys = sorted(
            (key for key, record in self.records.items() if lease and record[2] == lease), key=str.encode
        )
        if keys:
            self._change([(key, None, 0) for key in keys])
        self.leases.pop(lease, None)

    def values(self) -> dict[str, bytes]:
        self.expire()
        return {key: value for key, (value, _, _) in self.records.items()}
