"""The metadata store: the one owner of a cluster's truth.

Importing it is cheap: the modules behind it are loaded on first use. Begin reading with `interface.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.metadata.fencing import (
        HEAD_KEY,
        FencedStore,
        LeaderKey,
        open_fenced,
        read_fence,
        read_leader,
        write_fence,
    )
    from insitu.metadata.interface import (
        IDLE_SECONDS,
        MAX_KEY_BYTES,
        MAX_OPERATIONS,
        MAX_TRANSACTION_BYTES,
        MAX_VALUE_BYTES,
        Change,
        Compare,
        Delete,
        MetadataStore,
        Operation,
        Outcome,
        Put,
        Record,
        compare_found,
        end_calls_by,
    )
    from insitu.metadata.moving import (
        MOVED,
        MOVING,
        copy_records,
        put_mark,
        read_mark,
        read_records,
        remove_mark,
        require_target,
        require_truth,
    )
    from insitu.metadata.opening import open_store
    from insitu.metadata.settings import (
        MetadataSettings,
        drop_etcd,
        encode_settings,
        open_etcd,
        parse_settings,
        read_settings,
        read_url,
        write_settings,
    )

__getattr__, __dir__ = export_lazily(__name__)
