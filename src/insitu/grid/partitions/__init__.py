"""The files of partitions: their format, how they are written and mapped. Imports nothing else of `grid`.

Begin reading with `format.py`.
"""

from insitu.grid.partitions.address_space import AddressSpace
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
from insitu.grid.partitions.partition import BlockChecks, Partition
from insitu.grid.partitions.values import BlockedValues, TextValues, count_shared, ragged_rows
from insitu.grid.partitions.verification import (
    check_size,
    is_cut_short,
    record_written,
    verify_file,
    verify_once,
)
from insitu.grid.partitions.writer import PartitionWriter, WritePacing, refuse_changed
