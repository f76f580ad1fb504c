"""The files of partitions: their format, how they are written and mapped. Imports nothing else of `grid`.

Begin reading with `format.py`.
"""

from insitu.grid.partitions.address_space import AddressSpace
from insitu.grid.partitions.block_reader import DIRECT_ALIGNMENT, BlockReader
from insitu.grid.partitions.checksum import file_checksum
from insitu.grid.partitions.format import TEXT, body_alignment, row_bytes, rows_per_block, text_buffers
from insitu.grid.partitions.pacing import WritePacing
from insitu.grid.partitions.partition import Partition, make_corrupt_error
from insitu.grid.partitions.values import BlockedValues, TextValues
from insitu.grid.partitions.writer import PartitionWriter

__all__ = [
    "DIRECT_ALIGNMENT",
    "TEXT",
    "AddressSpace",
    "BlockReader",
    "BlockedValues",
    "Partition",
    "PartitionWriter",
    "TextValues",
    "WritePacing",
    "body_alignment",
    "file_checksum",
    "make_corrupt_error",
    "row_bytes",
    "rows_per_block",
    "text_buffers",
]
