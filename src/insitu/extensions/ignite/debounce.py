"""Waits until servers have stopped coming and going: until then partitions move on from server to server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.extensions.ignite.address import Address, read_settings
from insitu.extensions.ignite.cluster import Cluster

STABLE_SECONDS = 2.0
"""How long a topology version must stay to count as stable."""
_MOST_SECONDS = 60.0
"""After how long rows are read all the same: each partition is read whole from one server in any case."""
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Debounce:
    """Decides whether a topology version is stable. The time is passed in."""

    #: The version that was seen last.
    version: tuple[int, ...]
    #: Since when it was, by the caller's clock; None: since long ago.
    since: float | None = None

    def observe(self, version: Sequence[int], now: float) -> bool:
        """Take in the version of now. Returns whether it has stayed for STABLE_SECONDS."""
        if tuple(version) != self.version:
            self.version, self.since = tuple(version), now
        return self.since is None or now - self.since >= STABLE_SECONDS


def wait_until_stable(address: Address, known: Sequence[int]) -> None:
    """Return once the topology version is `known`, or another one that stays; after a minute in any case.

    Raises InputError and SourceError if no server answers.
    """
    debounce, deadline = Debounce(tuple(known)), time.monotonic() + _MOST_SECONDS
    with Cluster(address, read_settings()) as cluster:
        cluster.find_cache()
        while not debounce.observe(cluster.find_layout().topology, time.monotonic()):
            if time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_SECONDS)
