"""What the store of one node holds of the files of `insitu://`: names and blocks.

A file is an entry in the table of names and a list of blocks, each a file in memory or on the store's disk.
Which nodes hold what, and who decides about a name, isn't known here. Begin reading with `store.py`.
"""

from insitu.grid.shared_files.blocks import BlockFolder
from insitu.grid.shared_files.entries import (
    BLOCK_BYTES,
    DELETED,
    FILE,
    FOLDER,
    MAX_COPIES,
    Block,
    Entry,
    check_path,
    check_volume,
    checksum_block,
    encode_entries,
    parse_entries,
    parse_entry,
    split_path,
)
from insitu.grid.shared_files.names import KEEP_DELETED_SECONDS, Commit, ListedPath, NameTable
from insitu.grid.shared_files.store import (
    FileStore,
    list_file_nodes,
    list_local_volumes,
    read_memory_limit,
    remove_file_memory,
)

__all__ = [
    "BLOCK_BYTES",
    "DELETED",
    "FILE",
    "FOLDER",
    "KEEP_DELETED_SECONDS",
    "MAX_COPIES",
    "Block",
    "BlockFolder",
    "Commit",
    "Entry",
    "FileStore",
    "ListedPath",
    "NameTable",
    "check_path",
    "check_volume",
    "checksum_block",
    "encode_entries",
    "list_file_nodes",
    "list_local_volumes",
    "parse_entries",
    "parse_entry",
    "read_memory_limit",
    "remove_file_memory",
    "split_path",
]
