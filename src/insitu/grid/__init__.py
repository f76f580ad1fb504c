"""The grid: it stores rows. This is its door; everything is loaded on first use, so it costs nothing.

Begin reading with `reading`, the rows of a task, and `importing`, how they come in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.caches import (
        EpochVersions,
        Export,
        IdReader,
        Refresh,
        dataset,
        describe_refresh,
        export_cache,
        export_rows,
        find_refreshing_epoch,
        find_version,
        open_target,
        read_refreshes,
        read_snapshot,
        read_snapshot_again,
        record_failed_refresh,
        takes_rows,
    )
    from insitu.grid.catalog import (
        Catalog,
        CatalogWatch,
        StagedImport,
        check_distinct,
        check_here,
        delete_cache,
        disown_catalog,
        find_ended_imports,
        find_missing_here,
        find_unknown_versions,
        full_disk_as_error,
        home_errors,
        install_catalog_copy,
        is_catalog_copy,
        is_catalog_record,
        is_home_of_agent,
        is_in_etcd,
        list_held,
        list_nodes_with_stores,
        list_resumable,
        list_staged_imports,
        make_store_id,
        publish_file,
        read_store_id,
        read_stores,
        reconcile_store,
        scratch_folder,
        sweep,
        tidy_store,
    )
    from insitu.grid.importing import (
        check_names,
        find_source_files,
        import_cache,
        inspect_files,
        plan_import,
        run_import,
    )
    from insitu.grid.layout import owners_of_partition, shard_partitions
    from insitu.grid.maintenance import (
        RebalanceReport,
        RepairReport,
        rebalance_cache,
        repair_catalog,
        restore_copies,
    )
    from insitu.grid.reading import (
        Arrays,
        Batch,
        BlockRows,
        Counts,
        DataPosition,
        Dataset,
        EpochAudit,
        PartitionAudit,
        PartitionStatistics,
        PositionedData,
        RowSample,
        ShardLedger,
        agree_on_shards,
        audit,
        count_rows,
        hash_values,
        list_epochs,
        map_leaves,
        read_blocks,
        read_drawn,
        read_ledgers,
        read_numbered,
        read_shard_map,
        register_converter,
        sample_rows,
        to_block,
    )
    from insitu.grid.replicas import (
        CopyCheck,
        bring_up,
        find_second_paths,
        list_local_nodes,
        load_topology,
        scrub_cache,
        set_quotas,
        set_store_finder,
        take_down,
        verify_copies,
    )
    from insitu.grid.sources import open_object
    from insitu.grid.stores import StoreRoom, measure_store, set_file_memory

__getattr__, __dir__ = export_lazily(__name__)
