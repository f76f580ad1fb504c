"""The files of `insitu://`: their names, which are in the metadata store, and the blocks in one store.

A file is an entry under a name and a list of blocks, each a file in memory or on the store's disk. Which
nodes hold what isn't known here. Begin reading with `name_records.py` and `names.py`, then `store.py`.
"""

from insitu.grid.shared_files.blocks import BlockFolder
from insitu.grid.shared_files.entries import (
    BLOCK_BYTES,
    BLOCKS_A_LIST,
    FILE,
    FOLDER,
    MAX_COPIES,
    MAX_LISTED,
    Block,
    Entry,
    check_change,
    check_path,
    check_volume,
    checksum_block,
    make_block,
    pack_blocks,
    parse_entry,
    split_path,
    unpack_blocks,
)
from insitu.grid.shared_files.file_manifests import FileManifest, find_digest, parse_manifest, split_key
from insitu.grid.shared_files.garbage import GarbageList
from insitu.grid.shared_files.name_rebuilding import (
    NamesState,
    Origin,
    advance_generation,
    forget_others,
    make_origin,
    read_state,
    rebuild_names,
    record_earlier,
)
from insitu.grid.shared_files.name_records import Folder
from insitu.grid.shared_files.names import ListedPath, NameTree, UsedUp
from insitu.grid.shared_files.store import (
    FileStore,
    list_local_volumes,
    open_local_names,
    read_memory_limit,
    remove_file_memory,
    remove_local_names,
)
