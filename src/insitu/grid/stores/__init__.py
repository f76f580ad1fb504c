"""Limits and settings of a store. Begin reading with `quotas.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.stores.quotas import QuotaWatch, StoreRoom, check_quota, check_quotas, measure_store
    from insitu.grid.stores.store_settings import read_settings, set_file_memory, set_quota, write_settings

__getattr__, __dir__ = export_lazily(__name__)
