"""Reads the catalogue once for a process that asks again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from insitu.paths import Paths
    from insitu.spec import CacheSpec

_TICK = 1_000_000_000
"""Nanoseconds after which a file whose times are the same is taken for unchanged: of two changes within one
tick of the file system's clock, times show one."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What a catalogue holds."""

    #: The latest version of each cache, by name.
    latest: Sequence[CacheSpec]
    #: These, and older ones that a job uses.
    stored: Sequence[CacheSpec]


class CatalogIndex:
    """What the catalogue of a home holds. Read again when its file has changed. Safe for several threads."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        #: (inode, size, time of the last change) of the file that was read last.
        self._mark: tuple[int, int, int] | None = None
        self._versions = Versions((), ())

    def read(self) -> Versions:
        """Return what the catalogue holds. Raises what `Catalog.stored` raises."""
        from insitu.grid import Catalog

        with self._lock:
            try:
                found = self._paths.catalog.stat()
            except OSError:  # there is none yet, or none that can be read, which the catalogue says
                mark, is_old = None, False
            else:
                mark = found.st_ino, found.st_size, found.st_mtime_ns
                is_old = time.time_ns() - found.st_mtime_ns > _TICK
            if mark is None or mark != self._mark:
                catalog = Catalog(self._paths)
                self._versions = Versions(catalog.caches(), catalog.stored())
                self._mark = mark if is_old else None
            return self._versions
