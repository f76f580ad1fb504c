"""Rows of a cache for a task, in order, and the ledger of what was trained. Begin reading with `datasets.py`,
then `cache_reader.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.grid.reading.block_rows import BlockRows, read_blocks, read_drawn, read_numbered, to_block
    from insitu.grid.reading.cache_reader import ROW, CacheReader, numbers_rows
    from insitu.grid.reading.data_position import DataPosition, PositionedData
    from insitu.grid.reading.datasets import Batch, Dataset, register_converter
    from insitu.grid.reading.ledger import (
        EpochAudit,
        PartitionAudit,
        ShardLedger,
        audit,
        count_rows,
        list_epochs,
        read_ledgers,
    )
    from insitu.grid.reading.partition_statistics import Arrays, PartitionStatistics
    from insitu.grid.reading.reads import READS
    from insitu.grid.reading.row_hashes import hash_values
    from insitu.grid.reading.row_samples import RowSample, sample_rows
    from insitu.grid.reading.shards import agree_on_shards, read_shard_map, resolve
    from insitu.grid.reading.structure import map_leaves
    from insitu.grid.reading.value_counts import Counts

__getattr__, __dir__ = export_lazily(__name__)
