"""The right to change a cluster's metadata in etcd: it goes with the key of the head, which one process has.

The head writes down in its home the value that it has given that key, which no other head ever gives it.
Each change of a process there compares the two, so who has lost the key changes nothing, whenever that
process finds out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import replace_file
from insitu.base.disk.guarded_paths import read_guarded
from insitu.base.errors import CorruptMetadata, HeadReplaced
from insitu.base.paths import Paths
from insitu.metadata.interface import Change, Compare, MetadataStore, Operation, Outcome, Record
from insitu.metadata.settings import open_etcd, read_settings

HEAD_KEY = "head/leader"
"""The key that the head holds by its lease."""


@dataclass(frozen=True, slots=True)
class LeaderKey:
    """Contents of the head's key."""

    #: Its address, as host:port; empty: it is being started.
    address: str
    #: The first epoch of the number that it has won. Grows with each win.
    epoch: int
    #: Tells the winner from others.
    instance: str
    #: True: `insitu down` has ended it, and nobody may follow.
    is_down: bool = False

    def encode(self) -> bytes:
        """Return the key's value."""
        fields = {"address": self.address, "epoch": self.epoch, "instance": self.instance}
        return json.dumps({**fields, "down": self.is_down}).encode()


def read_leader(record: Record | None) -> LeaderKey | None:
    """Return what the key of the head says; None: nobody holds it. Raises CorruptMetadata."""
    if record is None:
        return None
    try:
        found = json.loads(record.value)
        address, epoch, instance, down = (found[name] for name in ("address", "epoch", "instance", "down"))
        if (type(address), type(epoch), type(instance), type(down)) != (str, int, str, bool):
            raise ValueError("its fields are of other types")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMetadata(
            f"The key {HEAD_KEY} in etcd must say which head leads. Received: {record.value!r:.200} "
            f"({error}). Remove it by etcdctl, and an agent becomes head"
        ) from error
    return LeaderKey(address, epoch, instance, down)


class FencedStore:
    """A store whose changes are refused unless the head's key has the value `fence`."""

    def __init__(self, store: MetadataStore, fence: bytes) -> None:
        self._store = store
        #: The value of the key of the head whose right this is.
        self.fence = fence

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        """As `MetadataStore.transact`. Raises HeadReplaced."""
        outcome = self._store.transact([Compare(HEAD_KEY, value=self.fence), *compare], operations, id)
        if outcome.succeeded:
            return outcome
        found = {record.key: record for record in outcome.found}
        self.check(found.pop(HEAD_KEY, None))
        return Outcome(False, outcome.revision, tuple(found.values()))

    def check(self, leader: Record | None) -> None:
        """Raise HeadReplaced if the key of the head is so that no change is made any more."""
        if leader is None or leader.value != self.fence:
            raise HeadReplaced(_describe(read_leader(leader)))

    def get(self, keys: Sequence[str]) -> tuple[dict[str, Record], int]:
        return self._store.get(keys)

    def range(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[list[Record], int]:
        return self._store.range(prefix, after, limit)

    def list_made(self) -> list[str]:
        return self._store.list_made()

    def watch(self, prefix: str, revision: int) -> Iterator[list[Change]]:
        return self._store.watch(prefix, revision)

    def grant(self, seconds: float) -> int:
        return self._store.grant(seconds)

    def keep(self, lease: int) -> bool:
        return self._store.keep(lease)

    def revoke(self, lease: int) -> None:
        self._store.revoke(lease)

    def close(self) -> None:
        self._store.close()


def _describe(leader: LeaderKey | None) -> str:
    other = (
        f"the one at {leader.address}"
        if leader is not None and leader.address
        else "one that is being started"
        if leader is not None and not leader.is_down
        else "none now, as the lease of the one here has ended"
    )
    return (
        f"The head that leads changes a cluster, and none of before. Received: a change here, and the head "
        f"that leads is {other}. Nothing was changed. Run the command on the machine of that head"
    )


def write_fence(paths: Paths, fence: bytes) -> None:
    """Write down the value with which the head of this home holds its key. Raises OSError."""
    replace_file(paths.fence, fence, sync=True, mode=PRIVATE_FILE)


def read_fence(paths: Paths) -> bytes | None:
    """Return the value with which this home's head holds its key; None: it doesn't. Raises InputError."""
    try:
        return read_guarded(paths.home, paths.fence)
    except FileNotFoundError:
        return None


def open_fenced(paths: Paths) -> FencedStore | None:
    """Return the store of a home whose head has led its cluster; None: its metadata isn't in etcd.

    Raises InputError, MetadataError, and HeadReplaced if no head of this home has led.
    """
    settings = read_settings(paths)
    if settings is None:
        return None
    fence = read_fence(paths)
    if fence is None:
        raise HeadReplaced(_describe(None))
    return FencedStore(open_etcd(settings), fence)
