"""Repairs of catalogues and stores, and moves of partitions. Begin reading with `repair.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.maintenance.rebalancer import RebalanceReport, rebalance_cache, restore_copies
    from insitu.grid.maintenance.repair import RepairReport, repair_catalog

__getattr__, __dir__ = export_lazily(__name__)
