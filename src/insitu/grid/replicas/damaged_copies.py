"""Handles a copy that can't be used: it is named once, passed over, and repaired from a good one.

While another copy in this home is good, that one is read at once, and the repair runs in a thread. Otherwise
the partition comes from another host into the place of the damaged copy, and is read there. Both repair as
`insitu scrub --repair` does. A copy that the system can't read now isn't replaced while there is another one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from pathlib import Path

from insitu.base.disk.access import file_mode, make_folder
from insitu.base.disk.durable import write_synced
from insitu.base.errors import CacheBusy, CorruptPartition, GridError, InsituError, UnreadablePartition
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.catalog import Catalog, add_to_manifest, is_store_here
from insitu.grid.replicas.elsewhere import find_stores_elsewhere
from insitu.grid.replicas.priorities import lower_thread
from insitu.grid.replicas.scrubbing import CopyCheck, Pace, check_copy, repair_from

logger = logging.getLogger("insitu")
_MOST_REPAIRS = 3
"""How often a process repairs the same copy. A disk that damages each one isn't worth more."""
_BUSY_SECONDS = 0.2


class NoOtherCopy(GridError):
    """There is nothing that a damaged copy could be replaced by."""


Identity = tuple[int, int, int] | None


def describe_partition(cache: CacheSpec, index: int) -> str:
    """Return the name of a partition as users know it."""
    return f"partition {index} of {cache.name} version {cache.version}"


class DamagedCopies:
    """The copies that this process has found damaged. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Why a file isn't used, and which file that was: one that replaces it may be good.
        self._found: dict[Path, tuple[Identity, CorruptPartition]] = {}
        #: Files of which a warning was given.
        self._named: set[tuple[Path, Identity]] = set()
        #: How often each was repaired here.
        self._repairs: Counter[Path] = Counter()
        #: The copies to repair, and the process whose thread does so; 0: none runs.
        self._waiting: deque[tuple[Paths, CacheSpec, int, NodeId]] = deque()
        self._process = 0

    def set_aside(self, path: Path, error: CorruptPartition) -> None:
        """Have no copy opened from this file any more, as long as it is the same one."""
        with self._lock:
            self._found[path] = (_identify(path), error)

    def check(self, path: Path) -> None:
        """Raise CorruptPartition for a file that was set aside."""
        with self._lock:
            found = self._found.get(path)
            if found is not None:
                if found[0] == _identify(path):
                    raise found[1]
                del self._found[path]

    def forget_unreadable(self, path: Path) -> None:
        """Let a file be tried again that the system couldn't read."""
        with self._lock:
            if path in self._found and isinstance(self._found[path][1], UnreadablePartition):
                del self._found[path]

    def report(
        self, paths: Paths, cache: CacheSpec, index: int, node: NodeId, error: CorruptPartition, other: NodeId
    ) -> None:
        """Say once that a copy can't be used, and have it repaired. `other`: the node whose copy is read."""
        path = paths.partition(node, cache.name, cache.version, index)
        with self._lock:
            key = (path, _identify(path))
            if key in self._named:
                return
            self._named.add(key)
        repairs = not isinstance(error, UnreadablePartition)
        logger.warning(
            "The copy of %s on %s can't be used: %s. That on %s is read instead%s",
            describe_partition(cache, index),
            node,
            error.why or error,
            other,
            ", and it is repaired in the background" if repairs else "",
        )
        if repairs:
            self._repair_soon(paths, cache, index, node)

    def fetch_here(
        self, paths: Paths, cache: CacheSpec, index: int, node: NodeId, error: CorruptPartition
    ) -> None:
        """Put a copy of another host in the place of one that can't be used. Raises CorruptPartition with the
        reason if that can't be done."""
        why = error.why or str(error)
        try:
            source = self._restore(paths, cache, index, node)
        except NoOtherCopy:
            raise error from None
        except (InsituError, OSError) as reason:
            failed = CorruptPartition(
                f"{error} The copy on {node} isn't replaced by one of another host: {reason}"
            )
            failed.why = why
            raise failed from error
        logger.warning(
            "The copy of %s on %s couldn't be used: %s. %s",
            describe_partition(cache, index),
            node,
            why,
            "Read again, it is right" if source == node else f"It was replaced by that of {source}",
        )

    def _repair_soon(self, *what: *tuple[Paths, CacheSpec, int, NodeId]) -> None:
        with self._lock:
            self._waiting.append(what)
            if self._process == os.getpid():
                return
            self._process = os.getpid()
        # Not a daemon: a short script ends when the copy that is being made is whole.
        threading.Thread(target=self._repair_all, name="insitu-repairs", daemon=False).start()

    def _repair_all(self) -> None:
        lower_thread()
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self._process = 0
                    return
                paths, cache, index, node = self._waiting.popleft()
            name = describe_partition(cache, index)
            try:
                source = self._restore(paths, cache, index, node)
                logger.info("The copy of %s on %s is repaired from that on %s", name, node, source)
            except (InsituError, OSError) as error:
                logger.warning("The copy of %s on %s isn't repaired: %s", name, node, error)

    def _restore(self, paths: Paths, cache: CacheSpec, index: int, node: NodeId) -> str:
        """Put a good copy in the place of a damaged one. Return whose it was. Raises InsituError, OSError."""
        path = paths.partition(node, cache.name, cache.version, index)
        if not is_store_here(paths, node):
            raise GridError(
                f"the store of {node} isn't at {paths.node(node)}. Check that its disk is mounted"
            )
        if Catalog(paths).find(cache.name, cache.version) is None:
            raise GridError("the version was replaced or deleted")
        if self._repairs[path] >= _MOST_REPAIRS:
            raise GridError(f"it was repaired or read again {_MOST_REPAIRS} times before. Check the disk")
        while True:
            try:
                source = restore_copy(paths, cache, index, node)
                with self._lock:
                    self._repairs[path] += 1
                    self._found.pop(path, None)
                return source
            except CacheBusy:  # another task of this host gets it
                time.sleep(_BUSY_SECONDS)


DAMAGED = DamagedCopies()
"""Those of this process."""


def restore_copy(paths: Paths, cache: CacheSpec, index: int, node: NodeId) -> str:
    """Put a good copy of another node, of this host or else of another one, in the place of a damaged one in
    this home. Returns the nodes that it may be from; `node` if that copy is good already. Raises InsituError,
    OSError."""
    info, pace = cache.partitions[index], Pace(None)
    folder = paths.version(node, cache.name, cache.version)
    damaged = check_copy(paths, cache, info, node, pace)
    if damaged.problem is None:
        return node
    others = [owner for owner in info.owners if owner != node]
    here = [check_copy(paths, cache, info, owner, pace) for owner in others if is_store_here(paths, owner)]
    good, remote = [check for check in here if check.problem is None], None
    if not good:
        remote = find_stores_elsewhere(paths)
        known = () if remote is None else remote.nodes
        good = [CopyCheck(index, owner, damaged.path) for owner in others if owner in known]
    if not good:
        raise NoOtherCopy(f"no other copy of {describe_partition(cache, index)} is known")
    make_folder(paths.home, folder)
    if node not in info.owners:  # it goes when no job needs it
        write_synced(paths.fetched(node, cache.name, cache.version, index), b"", file_mode(paths.home))
    repaired = repair_from(paths, cache, damaged, good, remote)
    if not repaired.repaired:
        raise GridError(str(repaired.problem))
    add_to_manifest(paths, node, cache, index)
    return good[0].node if remote is None else " or ".join(check.node for check in good)


def _identify(path: Path) -> Identity:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
