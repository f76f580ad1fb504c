"""`insitu start --refresh`: which version of its cache each epoch of a job reads.

Rows of another system that were added or changed enter as an epoch begins. The first task that comes to such
an epoch reads them into a new version, while the others wait for its record in the job's folder. A
record never changes: whatever is started again later, and every audit, finds the rows that the epoch had.

On hosts of agents the tasks ask the job's supervisor, since only there the catalogue can be changed. It has
the agents read the rows, and the record comes to each host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import replace_file
from insitu.base.errors import CacheBusy, GridError, InsituError, UnknownCache
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import CacheSpec
from insitu.grid.catalog import Catalog, publish_first

logger = logging.getLogger("insitu")
_LOOK_SECONDS = 0.05
_BUSY_SECONDS = 120.0
"""How long another process may be at work on the cache."""
_SUPERVISOR_READS = "The job's supervisor has the agents read"
_LOG_THERE = "controller.log in the job's folder there"
_ATTEMPTS = 5

ReadAgain = Callable[[Paths, CacheSpec], CacheSpec]
"""Reads the rows of now into a version that follows another one."""


def find_refreshing_epoch(epoch: int, every: int) -> int:
    """Return the latest epoch, `epoch` or one before it, at whose beginning rows are read again; 0: the rows
    are those of the job's start."""
    return epoch - epoch % every if every else 0


@dataclass(frozen=True, slots=True)
class Refresh:
    """The version that the epochs of a job read from one of them on."""

    #: The first of these epochs.
    epoch: int
    #: The version that they read.
    cache: CacheSpec
    #: Why no rows were read; None: they were.
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "problem": self.problem, "cache": self.cache.to_json()}


def read_refreshes(job: JobPaths) -> list[Refresh]:
    """Return all refreshes of a job by epoch, without what it read at its start. Raises GridError."""
    return [_read(path) for path in sorted(job.refreshes.glob("epoch-*.json"))]


def _read(path: Path) -> Refresh:
    try:
        found = json.loads(path.read_text())
        return Refresh(int(found["epoch"]), CacheSpec.from_json(found["cache"]), found["problem"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InsituError) as error:
        raise GridError(f"The refresh at {path} can't be read ({error}). Start the job again") from error


def describe_refresh(refresh: Refresh) -> str:
    """Return what a log says of the beginning of an epoch."""
    number, cache = refresh.epoch + 1, refresh.cache
    if refresh.problem is not None:
        return f"Epoch {number} reads the rows of version {cache.version} again: {refresh.problem}"
    digest = dict(cache.origin or {}).get("digest", "")
    return f"Epoch {number} reads {cache.rows} rows: version {cache.version}, digest {digest}"


def record_failed_refresh(job: JobPaths, first: CacheSpec, epoch: int, problem: str) -> None:
    """Write down that `epoch` has the rows of the previous one, unless there is a record of it."""
    job.refreshes.mkdir(mode=0o700, exist_ok=True)
    _publish(job, Refresh(epoch, _find_version_before(job, first, epoch), problem))


def _publish(job: JobPaths, refresh: Refresh) -> None:
    """Write a record, unless there is one of its epoch."""
    publish_first(job.refresh(refresh.epoch), json.dumps(refresh.to_json()).encode())


def _find_version_before(job: JobPaths, first: CacheSpec, epoch: int) -> CacheSpec:
    """Return what the epochs just before `epoch` have read."""
    earlier = [each for each in read_refreshes(job) if each.epoch < epoch]
    return find_version(earlier, first, epoch)


def find_version(refreshes: list[Refresh], first: CacheSpec, epoch: int) -> CacheSpec:
    """Return what `epoch` has read, as far as `refreshes` say, which are in order. `first`: the version of
    the job's start."""
    return next((each.cache for each in reversed(refreshes) if each.epoch <= epoch), first)


class EpochVersions:
    """The version of the job's cache that each epoch reads."""

    def __init__(
        self,
        paths: Paths,
        job: JobPaths,
        first: CacheSpec,
        every: int,
        seconds: float,
        read_again: ReadAgain | None = None,
        *,
        asks_supervisor: bool = False,
    ) -> None:
        """`first` is the version of the job's start, `every` after how many epochs rows are read again,
        `seconds` how long another process may take to read them. `asks_supervisor`: it has them read."""
        self._paths = paths
        self._job = job
        self._first = first
        self._every = every
        self._seconds = seconds
        self._read_again = read_again or _read_again
        self._asks_supervisor = asks_supervisor
        self._known: dict[int, CacheSpec] = {0: first}

    def find(self, epoch: int | None) -> CacheSpec:
        """Return the version that `epoch` reads; the first call of any task makes it. None: the newest one.

        If rows can't be read, it is the previous version, and the record says why. Raises GridError.
        """
        if epoch is None:
            newest = read_refreshes(self._job)[-1:]
            return newest[0].cache if newest else self._first
        begins = find_refreshing_epoch(epoch, self._every)
        if begins not in self._known:
            found = self._ask(begins) if self._asks_supervisor else self._agree(begins)
            self._known[begins] = found.cache
        return self._known[begins]

    def _agree(self, epoch: int) -> Refresh:
        path, deadline = self._job.refresh(epoch), time.monotonic() + self._seconds
        while not path.exists():
            with self._locked() as is_mine:
                if is_mine and not path.exists():
                    found = self._refresh(epoch)
                    _publish(self._job, found)
                    self._tell(found)
            if not is_mine:
                self._pause(deadline, epoch, "Another task reads", "nothing", "its log")
        return _read(path)

    def _ask(self, epoch: int) -> Refresh:
        """Wait for the record of the job's supervisor, and until this host's copy of the catalogue has it."""
        path, deadline = self._job.refresh(epoch), time.monotonic() + self._seconds
        if not path.exists():
            self._job.refreshes.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._job.refresh(epoch, wanted=True), str(epoch).encode())
        while not path.exists():
            self._pause(deadline, epoch, _SUPERVISOR_READS, "nothing from the head's machine", _LOG_THERE)
        found = _read(path)
        while Catalog(self._paths).find(found.cache.name, found.cache.version) is None:
            self._pause(deadline, epoch, _SUPERVISOR_READS, "no catalogue that has them", _LOG_THERE)
        return found

    def _pause(self, deadline: float, epoch: int, who: str, received: str, log: str) -> None:
        """Let some time pass. Raises GridError, which says who reads, if none is left."""
        if time.monotonic() >= deadline:
            raise GridError(
                f"{who} the rows of epoch {epoch + 1}. Received: {received} for "
                f"{self._seconds:g} s. Look at {log}, and give `insitu start` a longer --stall-timeout if "
                f"there are many rows"
            )
        time.sleep(_LOOK_SECONDS)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yield whether this process holds the lock, which the kernel takes from one that ends."""
        self._job.refreshes.mkdir(mode=0o700, exist_ok=True)
        with self._job.refresh_lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _refresh(self, epoch: int) -> Refresh:
        before = _find_version_before(self._job, self._first, epoch)
        try:
            return Refresh(epoch, self._read_and_pin(before))
        except InsituError as error:
            return Refresh(epoch, before, str(error))

    def _read_and_pin(self, before: CacheSpec) -> CacheSpec:
        deadline, attempt = time.monotonic() + min(_BUSY_SECONDS, self._seconds / 2), 0
        while True:
            try:
                cache = self._read_again(self._paths, before)
                Catalog(self._paths).pin(cache.name, cache.version, self._job.root.name)
                return cache
            except CacheBusy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_SECONDS)
            except UnknownCache:  # replaced by that of another job in this very moment
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise

    def _tell(self, refresh: Refresh) -> None:
        logger.log(logging.INFO if refresh.problem is None else logging.WARNING, describe_refresh(refresh))


def _read_again(paths: Paths, before: CacheSpec) -> CacheSpec:
    from insitu.grid.caches.snapshots import read_snapshot_again  # few jobs need it

    return read_snapshot_again(paths, before)
