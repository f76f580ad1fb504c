"""The caches that the tasks of a job on hosts read: their shards, the nodes to which their partitions are
brought, and the versions that epochs read."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NO_CACHE, CacheSpec, NodeId, ShardMap, split_version
from insitu.base.wording import format_count
from insitu.cluster.decide import find_shard_holders, find_successors
from insitu.cluster.engines import Message
from insitu.cluster.job_backup import encode_refresh, encode_shards
from insitu.cluster.job_files import MergedLog, append_copy, read_placement, read_spec
from insitu.cluster.wire import open_input
from insitu.grid import (
    Catalog,
    Refresh,
    agree_on_shards,
    describe_refresh,
    find_refreshing_epoch,
    read_refreshes,
    read_shard_map,
    record_failed_refresh,
)

_LOOK_SECONDS = 0.1
_MAX_BYTES_AHEAD = 1 << 30
"""Bytes of a cache that are brought ahead of a loss, at most."""
_KEPT_REFRESHES = 2
"""Versions of the job's cache, besides that of its start, whose partitions are brought to replacements."""


class JobSupplies:
    """Agrees on the shards of further caches, and brings partitions to their readers."""

    def __init__(self, job: JobPaths) -> None:
        """Raise InsituError if a version that the job has read before isn't there any more."""
        self._job = job
        self._paths = Paths(job.root.parent.parent)
        self._log = MergedLog(job)
        self._spec = read_spec(job)
        self._supplies: dict[str, PartitionSupply] = {}
        #: Further caches that tasks wait for, with nodes on which one task reads all of it.
        self._awaited: dict[str, set[NodeId]] = {}
        self._refreshes = JobRefreshes(job)
        #: Refreshes that tasks wait for, whose partitions aren't all at their readers.
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
        """Return once the partitions of all caches are at their `readers`; call `pause` meanwhile.

        Raises ClusterError if they can't be brought, or aren't there within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not self.advance(readers):
            if time.monotonic() >= deadline:
                raise ClusterError("partitions that other nodes hold are still on their way")
            pause(_LOOK_SECONDS)

    def advance(self, readers: Readers) -> bool:
        """Continue to bring what `readers` read; return whether all is there. Doesn't wait.

        Raises ClusterError if it can't be brought.
        """
        for supply in self._supplies.values():
            shard_map = supply.shard_map
            with contextlib.suppress(InsituError):  # the owners that are known may do
                supply.record_owners(Catalog(self._paths).get(shard_map.cache, shard_map.version))
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
        """Continue to bring what replacements would read if any one host of `readers` were lost, to the nodes
        on which they would run; return True once there is nothing more to do. Doesn't wait for anything.

        Bytes beyond `_MAX_BYTES_AHEAD`, or that can't be brought, are left until they are needed.
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

    def record_wanted(self, cache: str, whole_on: NodeId | None) -> None:
        """Note that a task waits for a further cache, or a version of it. `whole_on`: a task there reads all
        of it."""
        self._awaited.setdefault(cache, set()).update({whole_on} if whole_on is not None else ())

    def answer(self, readers: Readers) -> list[Message]:
        """Return the messages to all hosts about caches that tasks wait for. Doesn't wait for anything."""
        answers = []
        for cache, whole_on in list(self._awaited.items()):
            try:
                message = self._try(cache, whole_on, readers)
            except (InsituError, OSError) as error:
                message = {"do": "refused", "cache": cache.partition("@")[0], "text": str(error)}
            if message is not None:
                answers.append(message)
                del self._awaited[cache]
        return answers + self._answer_refreshes(readers)

    def record_wanted_refreshes(self, epochs: Sequence[int]) -> None:
        """Note that tasks wait for the rows of these epochs."""
        for epoch in epochs:
            self._refreshes.record_wanted(epoch)

    def _answer_refreshes(self, readers: Readers) -> list[Message]:
        """Return the records of epochs that tasks wait for, once the partitions are at their readers."""
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

    def _try(self, named: str, whole_on: set[NodeId], readers: Readers) -> Message | None:
        """Agree on the shards of a cache as tasks on one machine would. Return the message with them, once
        the partitions are at their readers. `named` may name a version, as in `orders@3`."""
        cache, version = split_version(named)
        if cache not in self._supplies:
            own = None if self._spec.cache == NO_CACHE else self._spec.cache
            if not self._job.shard_map(cache).exists():
                agree_on_shards(cache, self._paths, self._job, own, self._spec.shards, version)
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


# Has rows of another system read again for the epochs that the tasks of a job on hosts come to.
#
# A process of its own does that, see `refresh_reading.py`: the supervisor loads no library that moves
# bytes. It inherits the environment of `insitu start` or `insitu resume`, in which credentials are


READ_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.hosts_engine.refresh_reading")


class JobRefreshes:
    """Reads for one epoch at a time. An epoch whose rows can't be read has those of the previous one."""

    def __init__(self, job: JobPaths, command: Sequence[str] = READ_COMMAND) -> None:
        self._job = job
        self._command = command
        self._every = read_spec(job).refresh
        self._wanted: set[int] = set()
        #: The current reading: the epoch, and the process.
        self._reading: tuple[int, subprocess.Popen[bytes]] | None = None

    def record_wanted(self, epoch: int) -> None:
        """Note that tasks wait for the rows of an epoch. One at which nothing is read is ignored."""
        if epoch and self._every and find_refreshing_epoch(epoch, self._every) == epoch:
            self._wanted.add(epoch)

    def take_done(self) -> list[Refresh]:
        """Return the known records of epochs that tasks wait for, and continue with the others. Doesn't wait.

        Raises GridError.
        """
        if not self._wanted or (self._reading is not None and self._reading[1].poll() is None):
            return []
        if self._reading is not None:
            epoch, process = self._reading
            self._reading = None
            self._note_failure(
                epoch, f"the process that reads them ended with exit code {process.returncode}"
            )
        done = [each for each in read_refreshes(self._job) if each.epoch in self._wanted]
        self._wanted -= {each.epoch for each in done}
        if self._wanted:
            self._begin(min(self._wanted))
        return done

    def give_up(self) -> None:
        """Forget who waits: their waits have a limit."""
        self._wanted.clear()

    def _begin(self, epoch: int) -> None:
        command = [*self._command, str(self._job.root), str(epoch)]
        try:
            self._reading = epoch, subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            why = f"a process can't be started: {error}. Check memory and ulimit -u"
            self._note_failure(epoch, why)

    def _note_failure(self, epoch: int, why: str) -> None:
        """Write down why an epoch has no rows of its own, unless there is a record of it."""
        _, cache = read_placement(self._job)
        record_failed_refresh(self._job, cache, epoch, why)

    def close(self) -> None:
        """End what is under way."""
        if self._reading is not None:
            _, process = self._reading
            process.kill()
            process.wait()
            self._reading = None


# Brings the partitions of a cache to the nodes whose tasks read them, if their stores lack them.
#
# A process of its own does that, see `partition_fetch.py`: the supervisor loads no library that moves bytes


Readers = Mapping[NodeId, Collection[int]]
"""The shards that are read on each node."""
FETCH_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.hosts_engine.partition_fetch")


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
        #: Messages about fetched partitions, for the job's output; its reader empties it.
        self.news: list[str] = []
        #: Nodes that can't be reached: copies on others are fetched first. Its owner writes it.
        self.lost: Collection[NodeId] = ()
        self._home = home
        self._cache = cache
        self._command = command
        self._brought: dict[NodeId, set[int]] = {}
        #: Spans (start, end) in which partitions were brought, in seconds since 1970; its reader empties it.
        self.times: list[tuple[float, float]] = []
        self._began = 0.0
        #: The current fetch: the process, its output, and the partitions that it brings.
        self._fetching: tuple[subprocess.Popen[bytes], IO[bytes], dict[NodeId, set[int]]] | None = None

    def count_missing_bytes(self, readers: Readers) -> int:
        """Return the bytes of what `readers` lack."""
        missing = find_missing(self._cache, self.shard_map, readers)
        return sum(
            self._cache.partitions[index].bytes
            for node, indices in missing.items()
            for index in indices - self._brought.get(node, set())
        )

    def record_owners(self, cache: CacheSpec) -> None:
        """Take into account who owns the partitions of the same version now.

        A node that has owned one keeps it while the job has the version pinned.
        """
        self._record_held(self._cache)
        self._record_held(cache)
        self._cache = cache

    def _record_held(self, cache: CacheSpec) -> None:
        for info in cache.partitions:
            for node in info.owners:
                self._brought.setdefault(node, set()).add(info.index)

    def advance(self, readers: Readers) -> bool:
        """Continue to bring what `readers` lack; return True once all is there. Doesn't wait.

        Raises ClusterError if that failed; the next call tries again.
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
                f"{node} reads {format_count(len(indices), 'partition')} of {self._cache.name} that other "
                "nodes hold: "
                f"{moved} bytes were fetched"
            )

    def close(self) -> None:
        """End what is under way."""
        if self._fetching is not None:
            process, said, _ = self._fetching
            process.kill()
            process.wait()
            said.close()
