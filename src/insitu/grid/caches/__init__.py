"""Requests of users to a cache: rows, exports, predictions, snapshots of other systems. Begin reading with
`dataset_opening.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.caches.cache_export import Export, export_rows, takes_rows
    from insitu.grid.caches.dataset_opening import dataset
    from insitu.grid.caches.predictions import IdReader, open_target
    from insitu.grid.caches.refreshing import (
        EpochVersions,
        Refresh,
        describe_refresh,
        find_refreshing_epoch,
        find_version,
        read_refreshes,
        record_failed_refresh,
    )
    from insitu.grid.caches.row_export import export_cache
    from insitu.grid.caches.snapshots import read_snapshot, read_snapshot_again

__getattr__, __dir__ = export_lazily(__name__)
