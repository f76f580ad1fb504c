"""What an agent does about its store now and then: it removes what nobody needs, and ends imports that died.

Removing much takes long, so that is done in threads: the head hears from the agent meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from insitu.errors import InsituError
from insitu.grid import StagedImport, list_staged_imports, tidy_store
from insitu.grid.transfer import PartitionServer
from insitu.paths import Paths
from insitu.spec import NodeId

logger = logging.getLogger("insitu")
IMPORTS_SECONDS = 3.0
"""Seconds between two reports about imports that have brought something to the store."""
TIDY_SECONDS = 30.0


class StoreUpkeep:
    """The upkeep of one agent's store. In the head's own home commands end the imports that died."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        self._paths = paths
        self._node = node
        #: When imports are reported next, and when the store is tidied, on the monotonic clock.
        self._report_at = self._tidy_at = 0.0
        self._tidying: threading.Thread | None = None

    def list_imports(self, now: float) -> Sequence[StagedImport]:
        """Return the imports to be reported to the head, if it is time for that."""
        if now < self._report_at or self._paths.head.exists():
            return ()
        self._report_at = now + IMPORTS_SECONDS
        return list_staged_imports(self._paths)

    def end_import(
        self, server: PartitionServer, staged: StagedImport, published: bool, then: Callable[[], None]
    ) -> None:
        """Mark what an import has brought as published, or remove it, in a thread; `then` is called after."""
        logger.info("the import %s of %s has ended; published: %s", staged.token, staged.cache, published)

        def end() -> None:
            try:
                server.actions.end_import(staged.cache, staged.token, published=published)
            except (InsituError, OSError) as error:
                logger.warning("the import %s of %s isn't ended: %s", staged.token, staged.cache, error)
            then()

        threading.Thread(target=end, daemon=True).start()

    def tidy_soon(self) -> None:
        """Have the next call of `tidy` do it: the catalogue is new."""
        self._tidy_at = 0.0

    def tidy(self, now: float) -> None:
        """Remove from the store what nobody needs any more, if it is time for that, in a thread."""
        busy = self._tidying is not None and self._tidying.is_alive()
        if now < self._tidy_at or busy:
            return
        self._tidy_at = now + TIDY_SECONDS
        self._tidying = threading.Thread(target=self._tidy, daemon=True)
        self._tidying.start()

    def _tidy(self) -> None:
        try:
            tidy_store(self._paths, self._node)
        except (InsituError, OSError) as error:
            logger.warning("the store isn't tidied: %s", error)
