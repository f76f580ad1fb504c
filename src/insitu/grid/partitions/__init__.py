"""The files of partitions: their format, how they are written and mapped. Imports nothing else of `grid`.

Begin reading with `format.py`.
"""

from insitu.grid.partitions.address_space import AddressSpace
from insitu.grid.partitions.block_checks import BlockChecks
from insitu.grid.partitions.block_layout import make_corrupt_error, make_unreadable_error
from insitu.grid.partitions.block_reader import DIRECT_ALIGNMENT, BlockReader
from insitu.grid.partitions.checksum import checksum_text, file_checksum
from insitu.grid.partitions.compressed_reader import open_block_reader
from insitu.grid.partitions.direct_file import make_room
from insitu.grid.partitions.format import (
    RAGGED,
    TEXT,
    body_alignment,
    check_rows,
    column_offsets,
    is_ragged,
    is_variable,
    make_batch,
    row_bytes,
    rows_per_block,
    text_buffers,
    value_dtype,
)
from insitu.grid.partitions.format import values_of_batch as values_of_rows
from insitu.grid.partitions.pacing import WritePacing
from insitu.grid.partitions.partition import Partition
from insitu.grid.partitions.values import BlockedValues, TextValues, count_shared, ragged_rows
from insitu.grid.partitions.writer import PartitionWriter, refuse_changed

__all__ = [
    "DIRECT_ALIGNMENT",
    "RAGGED",
    "TEXT",
    "AddressSpace",
    "BlockChecks",
    "BlockReader",
    "BlockedValues",
    "Partition",
    "PartitionWriter",
    "TextValues",
    "WritePacing",
    "body_alignment",
    "check_rows",
    "checksum_text",
    "column_offsets",
    "count_shared",
    "file_checksum",
    "is_ragged",
    "is_variable",
    "make_batch",
    "make_corrupt_error",
    "make_room",
    "make_unreadable_error",
    "open_block_reader",
    "ragged_rows",
    "refuse_changed",
    "row_bytes",
    "rows_per_block",
    "text_buffers",
    "value_dtype",
    "values_of_rows",
]
