"""The caches that the tasks of a job on hosts read: their shards, where their partitions are brought, and
the versions that epochs read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from insitu.cluster.agents.job_code_copy import encode_refresh, encode_shards
from insitu.cluster.agents.job_refreshes import JobRefreshes
from insitu.cluster.agents.partition_supply import PartitionSupply, Readers
from insitu.cluster.decide import find_shard_holders, find_successors
from insitu.cluster.engines import Message
from insitu.cluster.job_files import MergedLog, append_copy, read_placement, read_spec
from insitu.errors import ClusterError, InsituError
from insitu.grid import (
    Catalog,
    Refresh,
    agree_on_shards,
    describe_refresh,
    read_refreshes,
    read_shard_map,
)
from insitu.paths import JobPaths, Paths
from insitu.spec import NO_CACHE, NodeId

_LOOK_SECONDS = 0.1
_MAX_BYTES_AHEAD = 1 << 30
"""Bytes of a cache that are brought ahead of a loss, at most."""
_KEPT_REFRESHES = 2
"""Versions of the job's cache, besides that of its start, whose partitions are brought to replacements."""


class JobSupplies:
    """Agrees on the shards of further caches, and has partitions where they are read."""

    def __init__(self, job: JobPaths) -> None:
        """Raise InsituError where a version that the job has read before isn't there any more."""
        self._job = job
        self._paths = Paths(job.root.parent.parent)
        self._log = MergedLog(job)
        self._spec = read_spec(job)
        self._supplies: dict[str, PartitionSupply] = {}
        #: Further caches that tasks wait for, with nodes on which one task reads all of it.
        self._awaited: dict[str, set[NodeId]] = {}
        self._refreshes = JobRefreshes(job)
        #: Those that tasks wait for, whose partitions aren't all where they are read.
        self._unanswered: dict[int, Refresh] = {}
        for path in job.shard_maps.glob("*.json"):
            found = read_shard_map(path)
            if found is not None and found[0].cache != NO_CACHE:
                self._add(found[0].cache)
        for refresh in read_refreshes(job)[-_KEPT_REFRESHES:]:
            self._supply_of(refresh)

    def _add(self, cache: str) -> None:
        found = read_shard_map(self._job.shard_map(cache))
        if found is not None:
            spec = Catalog(self._paths).get(cache, found[0].version)
            self._supplies[cache] = PartitionSupply(self._paths.home, spec, found[0])

    def require(self, readers: Readers, seconds: float, pause: Callable[[float], None]) -> None:
        """Return once the partitions of all caches are where `readers` read them; call `pause` meanwhile.

        Raises ClusterError where they can't be brought, or aren't there within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not self.advance(readers):
            if time.monotonic() >= deadline:
                raise ClusterError("partitions that other nodes hold are still on their way")
            pause(_LOOK_SECONDS)

    def advance(self, readers: Readers) -> bool:
        """Go on bringing what `readers` read; return whether all is there. Doesn't wait.

        Raises ClusterError where it can't be brought.
        """
        for supply in self._supplies.values():
            shard_map = supply.shard_map
            with contextlib.suppress(InsituError):  # the owners that are known may do
                supply.note_owners(Catalog(self._paths).get(shard_map.cache, shard_map.version))
        return all([self._advance(each, readers) for each in self._supplies.values()])  # noqa: C419

    def _advance(self, supply: PartitionSupply, readers: Readers) -> bool:
        try:
            done = supply.advance(readers)
        finally:
            for began, ended in supply.times:
                append_copy(self._job, began, ended)
            supply.times.clear()
        for text in supply.news:
            self._log.log(text)
        supply.news.clear()
        return done

    def avoid(self, lost: Collection[NodeId]) -> None:
        """Fetch copies of these nodes, which can't be reached, last."""
        for supply in self._supplies.values():
            supply.lost = frozenset(lost)

    def bring_ahead(self, readers: Readers, lost: Collection[NodeId]) -> bool:
        """Go on bringing what replacements would read if any one host of `readers` were lost, to where they
        would run; return True once there is nothing more to do. Doesn't wait for anything.

        What is more than `_MAX_BYTES_AHEAD`, or can't be brought, is left until it is needed.
        """
        done = True
        placement, cache = read_placement(self._job)
        holders = find_shard_holders(placement.shard_map, placement.home_nodes, cache)
        successors = find_successors(readers.items(), holders, lost)
        for supply in self._supplies.values():
            if 0 < supply.count_missing_bytes(successors) <= _MAX_BYTES_AHEAD:
                with contextlib.suppress(ClusterError):
                    done = self._advance(supply, successors) and done
        return done

    def note_wanted(self, cache: str, whole_on: NodeId | None) -> None:
        """Note that a task waits for a further cache. `whole_on`: a task there reads all of it."""
        self._awaited.setdefault(cache, set()).update({whole_on} if whole_on is not None else ())

    def answer(self, readers: Readers) -> list[Message]:
        """Return what to tell all hosts about caches that tasks wait for. Doesn't wait for anything."""
        answers = []
        for cache, whole_on in list(self._awaited.items()):
            try:
                message = self._try(cache, whole_on, readers)
            except (InsituError, OSError) as error:
                message = {"do": "refused", "cache": cache, "text": str(error)}
            if message is not None:
                answers.append(message)
                del self._awaited[cache]
        return answers + self._answer_refreshes(readers)

    def note_wanted_refreshes(self, epochs: Sequence[int]) -> None:
        """Note that tasks wait for the rows of these epochs."""
        for epoch in epochs:
            self._refreshes.note_wanted(epoch)

    def _answer_refreshes(self, readers: Readers) -> list[Message]:
        """Return the records of epochs that tasks wait for, once the partitions are where they are read."""
        try:
            self._unanswered |= {refresh.epoch: refresh for refresh in self._refreshes.take_done()}
        except (InsituError, OSError) as error:
            self._log.log(f"The rows of an epoch aren't known: {error}")
            self._refreshes.give_up()
        answers = []
        for epoch, refresh in list(self._unanswered.items()):
            try:
                is_there = self._advance(self._supply_of(refresh), readers)
            except InsituError as error:  # the tasks that lack some say so themselves
                self._log.log(f"Epoch {epoch + 1}: {error}")
                is_there = True
            if is_there:
                self._log.log(describe_refresh(refresh))
                answers.append(encode_refresh(epoch, self._job.refresh(epoch).read_text()))
                del self._unanswered[epoch]
        return answers

    def _supply_of(self, refresh: Refresh) -> PartitionSupply:
        """Return what brings the partitions of the version that an epoch reads. Those of old ones go."""
        cache = refresh.cache
        first = self._supplies[cache.name]
        if first.shard_map.version == cache.version:
            return first
        key = f"{cache.name} {cache.version:012d}"  # no cache has a name with a space
        if key not in self._supplies:
            shard_map = replace(first.shard_map, version=cache.version)
            self._supplies[key] = PartitionSupply(self._paths.home, cache, shard_map)
            others = sorted(k for k in self._supplies if k.startswith(f"{cache.name} ") and k != key)
            for old in others[: -(_KEPT_REFRESHES - 1)]:  # this one is kept whatever its number is
                self._supplies.pop(old).close()
        return self._supplies[key]

    def _try(self, cache: str, whole_on: set[NodeId], readers: Readers) -> Message | None:
        """Agree on the shards of a cache as tasks on one machine would. Return the message with them, once
        the partitions are where they are read."""
        if cache not in self._supplies:
            own = None if self._spec.cache == NO_CACHE else self._spec.cache
            if not self._job.shard_map(cache).exists():
                agree_on_shards(cache, self._paths, self._job, own, self._spec.shards)
            self._add(cache)
        supply = self._supplies[cache]
        everything = dict.fromkeys(whole_on, range(len(supply.shard_map.shards)))
        if not self._advance(supply, _merge(readers, everything)):
            return None
        return encode_shards(self._job.shard_map(cache).read_text())

    def close(self) -> None:
        """End what is under way."""
        self._refreshes.close()
        for supply in self._supplies.values():
            supply.close()


def _merge(readers: Readers, others: Mapping[NodeId, range]) -> Readers:
    return {
        node: {*readers.get(node, ()), *others.get(node, ())} for node in {**dict(readers), **dict(others)}
    }
