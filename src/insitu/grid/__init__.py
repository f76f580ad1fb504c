"""The grid: where rows live. This is its door; everything is loaded on first use, so it costs nothing.

Begin reading with `datasets.py`, the rows of a task, and `importer.py`, how they come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.grid.catalog import Catalog
    from insitu.grid.catalog_copy import (
        CatalogWatch,
        adopt_catalog_copy,
        install_catalog_copy,
        is_catalog_copy,
    )
    from insitu.grid.conversion import register_converter
    from insitu.grid.copies_here import check_here, find_missing_here
    from insitu.grid.data_position import DataPosition, PositionedData
    from insitu.grid.dataset_opening import dataset
    from insitu.grid.datasets import Batch, Dataset
    from insitu.grid.deletion import delete_cache
    from insitu.grid.elsewhere import set_store_finder
    from insitu.grid.files import full_disk_as_error, publish_file
    from insitu.grid.ignite_export import export_cache
    from insitu.grid.ignite_snapshots import read_snapshot, read_snapshot_again
    from insitu.grid.importer import import_cache
    from insitu.grid.inventory import list_held, reconcile_store
    from insitu.grid.layout import owners_of_partition, shard_partitions
    from insitu.grid.ledger import EpochAudit, PartitionAudit, ShardLedger, audit, list_epochs, read_ledgers
    from insitu.grid.leftovers import (
        StagedImport,
        find_ended_imports,
        list_resumable,
        list_staged_imports,
        sweep,
    )
    from insitu.grid.manifests import find_unknown_versions
    from insitu.grid.partitions import count_shared
    from insitu.grid.predictions import KeyReader, open_target
    from insitu.grid.quotas import StoreRoom, measure_store
    from insitu.grid.rebalancer import RebalanceReport, rebalance_cache, restore_copies
    from insitu.grid.refreshing import (
        EpochVersions,
        Refresh,
        describe_refresh,
        find_refreshing_epoch,
        find_version,
        parse_refresh,
        read_refreshes,
        record_failed_refresh,
    )
    from insitu.grid.repair import RepairReport, repair_catalog
    from insitu.grid.row_samples import RowSample, sample_rows
    from insitu.grid.scrubbing import CopyCheck, scrub_cache, verify_copies
    from insitu.grid.shards import agree_on_shards, read_shard_map
    from insitu.grid.store_identity import (
        check_distinct,
        is_home_of_agent,
        list_nodes_with_stores,
        make_store_id,
        read_store_id,
        read_stores,
    )
    from insitu.grid.store_settings import set_file_memory
    from insitu.grid.store_tidying import tidy_store
    from insitu.grid.structure import map_leaves
    from insitu.grid.tiering import Tier, TierMove, measure_move, move_cache
    from insitu.grid.tiers import find_slow_copies
    from insitu.grid.topology import (
        apply_tier_modes,
        bring_up,
        list_local_nodes,
        load_topology,
        set_up_stores,
        take_down,
    )

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "catalog": ("Catalog",),
        "catalog_copy": (
            "CatalogWatch",
            "adopt_catalog_copy",
            "install_catalog_copy",
            "is_catalog_copy",
        ),
        "copies_here": ("check_here", "find_missing_here"),
        "conversion": ("register_converter",),
        "data_position": ("DataPosition", "PositionedData"),
        "dataset_opening": ("dataset",),
        "datasets": ("Batch", "Dataset"),
        "row_samples": ("RowSample", "sample_rows"),
        "deletion": ("delete_cache",),
        "elsewhere": ("set_store_finder",),
        "files": ("full_disk_as_error", "publish_file"),
        "ignite_export": ("export_cache",),
        "ignite_snapshots": ("read_snapshot", "read_snapshot_again"),
        "importer": ("import_cache",),
        "inventory": ("list_held", "reconcile_store"),
        "leftovers": (
            "StagedImport",
            "find_ended_imports",
            "list_resumable",
            "list_staged_imports",
            "sweep",
        ),
        "layout": ("owners_of_partition", "shard_partitions"),
        "ledger": ("EpochAudit", "PartitionAudit", "ShardLedger", "audit", "list_epochs", "read_ledgers"),
        "manifests": ("find_unknown_versions",),
        "partitions": ("count_shared",),
        "predictions": ("KeyReader", "open_target"),
        "quotas": ("StoreRoom", "measure_store"),
        "rebalancer": ("RebalanceReport", "rebalance_cache", "restore_copies"),
        "refreshing": (
            "EpochVersions",
            "Refresh",
            "describe_refresh",
            "find_refreshing_epoch",
            "find_version",
            "parse_refresh",
            "read_refreshes",
            "record_failed_refresh",
        ),
        "repair": ("RepairReport", "repair_catalog"),
        "store_identity": (
            "check_distinct",
            "is_home_of_agent",
            "list_nodes_with_stores",
            "make_store_id",
            "read_store_id",
            "read_stores",
        ),
        "shards": ("agree_on_shards", "read_shard_map"),
        "store_settings": ("set_file_memory",),
        "store_tidying": ("tidy_store",),
        "structure": ("map_leaves",),
        "scrubbing": ("CopyCheck", "scrub_cache", "verify_copies"),
        "tiering": ("Tier", "TierMove", "measure_move", "move_cache"),
        "tiers": ("find_slow_copies",),
        "topology": (
            "apply_tier_modes",
            "bring_up",
            "list_local_nodes",
            "load_topology",
            "set_up_stores",
            "take_down",
        ),
    },
)

__all__ = [
    "Batch",
    "Catalog",
    "CatalogWatch",
    "CopyCheck",
    "DataPosition",
    "Dataset",
    "EpochAudit",
    "EpochVersions",
    "KeyReader",
    "PartitionAudit",
    "PositionedData",
    "RebalanceReport",
    "Refresh",
    "RepairReport",
    "RowSample",
    "ShardLedger",
    "StagedImport",
    "StoreRoom",
    "Tier",
    "TierMove",
    "adopt_catalog_copy",
    "agree_on_shards",
    "apply_tier_modes",
    "audit",
    "bring_up",
    "check_distinct",
    "check_here",
    "count_shared",
    "dataset",
    "delete_cache",
    "describe_refresh",
    "export_cache",
    "find_ended_imports",
    "find_missing_here",
    "find_refreshing_epoch",
    "find_slow_copies",
    "find_unknown_versions",
    "find_version",
    "full_disk_as_error",
    "import_cache",
    "install_catalog_copy",
    "is_catalog_copy",
    "is_home_of_agent",
    "list_epochs",
    "list_held",
    "list_local_nodes",
    "list_nodes_with_stores",
    "list_resumable",
    "list_staged_imports",
    "load_topology",
    "make_store_id",
    "map_leaves",
    "measure_move",
    "measure_store",
    "move_cache",
    "open_target",
    "owners_of_partition",
    "parse_refresh",
    "publish_file",
    "read_ledgers",
    "read_refreshes",
    "read_shard_map",
    "read_snapshot",
    "read_snapshot_again",
    "read_store_id",
    "read_stores",
    "rebalance_cache",
    "reconcile_store",
    "record_failed_refresh",
    "register_converter",
    "repair_catalog",
    "restore_copies",
    "sample_rows",
    "scrub_cache",
    "set_file_memory",
    "set_store_finder",
    "set_up_stores",
    "shard_partitions",
    "sweep",
    "take_down",
    "tidy_store",
    "verify_copies",
]
