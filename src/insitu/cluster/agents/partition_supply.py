"""Brings the partitions of a cache to the nodes whose tasks read them, where their stores lack them.

A process of its own does that, see `partition_fetch.py`: the supervisor loads no library that moves bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from insitu.cluster.agents.detached import open_input
from insitu.errors import ClusterError
from insitu.spec import CacheSpec, NodeId, ShardMap

Readers = Mapping[NodeId, Collection[int]]
"""The shards that are read on each node."""
FETCH_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.agents.partition_fetch")


def find_missing(cache: CacheSpec, shard_map: ShardMap, readers: Readers) -> dict[NodeId, set[int]]:
    """Return the partitions that nodes read and have no placed copy of."""
    missing = {
        node: {
            index
            for shard in shards
            for index in shard_map.shards[shard]
            if node not in cache.partitions[index].owners
        }
        for node, shards in readers.items()
    }
    return {node: indices for node, indices in missing.items() if indices}


def prefer_reachable(cache: CacheSpec, lost: Collection[NodeId]) -> CacheSpec:
    """Return the cache with owners that can't be reached last: a fetch begins with the first one."""
    if not lost:
        return cache
    partitions = tuple(
        replace(p, owners=tuple(sorted(p.owners, key=lambda owner: owner in lost))) for p in cache.partitions
    )
    return replace(cache, partitions=partitions)


class PartitionSupply:
    """Brings the partitions of one cache of one job."""

    def __init__(
        self, home: Path, cache: CacheSpec, shard_map: ShardMap, command: Sequence[str] = FETCH_COMMAND
    ) -> None:
        self.shard_map = shard_map
        #: What was fetched, for the job's output; its reader empties it.
        self.news: list[str] = []
        #: Nodes that can't be reached: copies on others are fetched first. Its owner writes it.
        self.lost: Collection[NodeId] = ()
        self._home = home
        self._cache = cache
        self._command = command
        self._brought: dict[NodeId, set[int]] = {}
        #: From when to when partitions were brought, in seconds since 1970; its reader empties it.
        self.times: list[tuple[float, float]] = []
        self._began = 0.0
        #: What is under way: the process, what it says, and what it brings.
        self._fetching: tuple[subprocess.Popen[bytes], IO[bytes], dict[NodeId, set[int]]] | None = None

    def count_missing_bytes(self, readers: Readers) -> int:
        """Return the bytes of what `readers` lack."""
        missing = find_missing(self._cache, self.shard_map, readers)
        return sum(
            self._cache.partitions[index].bytes
            for node, indices in missing.items()
            for index in indices - self._brought.get(node, set())
        )

    def note_owners(self, cache: CacheSpec) -> None:
        """Take into account who owns the partitions of the same version now.

        A node that has owned one keeps it while the job has the version pinned.
        """
        self._note_held(self._cache)
        self._note_held(cache)
        self._cache = cache

    def _note_held(self, cache: CacheSpec) -> None:
        for info in cache.partitions:
            for node in info.owners:
                self._brought.setdefault(node, set()).add(info.index)

    def advance(self, readers: Readers) -> bool:
        """Go on bringing what `readers` lack; return True once all is there. Doesn't wait.

        Raises ClusterError where that failed; the next call tries again.
        """
        if self._fetching is not None:
            process, said, wanted = self._fetching
            if process.poll() is None:
                return False
            self._fetching = None
            self._note(process.returncode, said, wanted)
        missing = {
            node: indices - self._brought.get(node, set())
            for node, indices in find_missing(self._cache, self.shard_map, readers).items()
        }
        missing = {node: indices for node, indices in missing.items() if indices}
        if missing:
            self._begin(missing)
        return not missing

    def _begin(self, missing: dict[NodeId, set[int]]) -> None:
        wanted = {node: sorted(indices) for node, indices in missing.items()}
        cache = prefer_reachable(self._cache, self.lost)
        message = json.dumps({"cache": cache.to_json(), "wanted": wanted})
        said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with open_input(message) as source:
                process = subprocess.Popen([*self._command, str(self._home)], stdin=source, stdout=said)
        except OSError as error:
            said.close()
            raise ClusterError(f"A process can't be started: {error}. Check memory and ulimit -u") from error
        self._fetching, self._began = (process, said, missing), time.time()

    def _note(self, code: int, said: IO[bytes], wanted: dict[NodeId, set[int]]) -> None:
        self.times.append((self._began, time.time()))
        with said:
            said.seek(0)
            try:
                answer = json.loads(said.read())
            except ValueError:
                answer = {"error": f"the process that fetches them ended with exit code {code}"}
        if "error" in answer:
            nodes = ", ".join(sorted(wanted))
            raise ClusterError(
                f"partitions of {self._cache.name} can't be fetched to {nodes}: {answer['error']}"
            )
        for node, indices in wanted.items():
            self._brought.setdefault(node, set()).update(indices)
            moved = int(answer["moved"].get(node, 0))
            self.news.append(
                f"{node} reads {len(indices)} partition(s) of {self._cache.name} that other nodes hold: "
                f"{moved} bytes were fetched"
            )

    def close(self) -> None:
        """End what is under way."""
        if self._fetching is not None:
            process, said, _ = self._fetching
            process.kill()
            process.wait()
            said.close()
