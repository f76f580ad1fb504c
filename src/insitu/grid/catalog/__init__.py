"""Lists caches, their partitions' stores, and the manifests of stores. Begin reading with `catalog.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.catalog.catalog import Catalog
    from insitu.grid.catalog.catalog_copy import (
        CatalogWatch,
        disown_catalog,
        install_catalog_copy,
        is_catalog_copy,
        refuse_copy,
    )
    from insitu.grid.catalog.catalog_schema import SCHEMA_VERSION, read_schema_version
    from insitu.grid.catalog.catalog_sharing import is_catalog_record, is_in_etcd
    from insitu.grid.catalog.deletion import delete_cache
    from insitu.grid.catalog.files import (
        cache_locks,
        full_disk_as_error,
        home_errors,
        publish_file,
        publish_first,
    )
    from insitu.grid.catalog.inventory import list_held, reconcile_store
    from insitu.grid.catalog.local_replicas import (
        check_here,
        find_copies,
        find_missing_here,
        is_store_here,
        should_lie_here,
    )
    from insitu.grid.catalog.manifests import (
        Manifest,
        StoredVersion,
        add_to_manifest,
        commit_manifest,
        commit_manifests,
        find_unknown_versions,
        find_versions,
        last_published_version,
        manifest_lock,
        next_stored_version,
        next_version,
        prepare_manifest,
        read_manifest,
        write_manifest,
    )
    from insitu.grid.catalog.orphaned_imports import (
        StagedImport,
        find_ended_imports,
        host_mark,
        is_of_another_host,
        list_resumable,
        list_staged_imports,
        measure_dead,
        read_prepared,
        scratch_folder,
        sweep,
    )
    from insitu.grid.catalog.store_identity import (
        check_distinct,
        is_home_of_agent,
        list_nodes_with_stores,
        make_store_id,
        read_store_id,
        read_stores,
        update_stores,
    )
    from insitu.grid.catalog.store_tidying import tidy_store

__getattr__, __dir__ = export_lazily(__name__)
