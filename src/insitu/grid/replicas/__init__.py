"""The copies of partitions on nodes: found, compared, replaced. Begin reading with `scrubbing.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.replicas.damaged_copies import DAMAGED, describe_partition
    from insitu.grid.replicas.elsewhere import set_store_finder
    from insitu.grid.replicas.priorities import in_background, lower_thread
    from insitu.grid.replicas.scrubbing import (
        CopyCheck,
        Pace,
        check_copy,
        put_copy,
        scrub_cache,
        verify_copies,
        with_owners,
    )
    from insitu.grid.replicas.topology import (
        bring_up,
        find_second_paths,
        list_local_nodes,
        load_topology,
        set_quotas,
        take_down,
    )

__getattr__, __dir__ = export_lazily(__name__)
