"""Actions of one store on blocks of files for others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from insitu.base.disk.access import is_shared, make_file, make_folder
from insitu.base.errors import InputError
from insitu.base.paths import MEMORY, Paths
from insitu.base.spec import NodeId
from insitu.grid.catalog import list_nodes_with_stores
from insitu.grid.shared_files.blocks import BlockFolder
from insitu.grid.shared_files.entries import (
    BLOCK_BYTES,
    check_key,
    check_volume,
    checksum_block,
)
from insitu.grid.shared_files.names import NameTree
from insitu.grid.stores import check_quota, read_settings
from insitu.metadata import MetadataStore, open_store

Fields = Mapping[str, Any]
Answer = tuple[dict[str, Any], bytes]
_SHARE = 8
"""One part of so many of the host's memory holds files, unless the store's settings say otherwise."""
_MAX_KEYS = 1 << 20


class FileStore:
    """Blocks in the store of `node`."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        """Raise InputError if a version of insitu before this one has left files that would be lost."""
        _refuse_old_names(paths, node)
        self.node = node
        self._paths = paths
        memory = paths.file_memory(node) if MEMORY.is_dir() and not is_shared(paths.home) else None
        #: The blocks.
        self.blocks = BlockFolder(
            paths.home,
            paths.file_blocks(node),
            memory,
            lambda: read_memory_limit(paths, node),
            lambda need: check_quota(paths, node, need),
        )
        self._actions: Mapping[str, Callable[[Fields, bytes], Answer]] = {
            "ping": lambda fields, payload: ({}, b""),
            "put": self._put,
            "get": self._get,
            "drop": self._drop,
            "keep": self._keep,
            "damaged": self._drop_damaged,
            "held": self._list_held,
            "manifests": self._list_manifests,
            "block_volumes": lambda fields, payload: ({"volumes": self.blocks.list_volumes()}, b""),
            "usage": self._measure,
        }

    def act(self, kind: str, fields: Fields, payload: bytes = b"", seconds: float | None = None) -> Answer:
        """Do what is asked for, however long that takes. Raises InsituError, OSError."""
        if kind not in self._actions:
            raise InputError(f"A node doesn't know this about files. Received: {kind!r:.100}")
        return self._actions[kind](fields, payload)

    def _put(self, fields: Fields, payload: bytes) -> Answer:
        volume, key = check_volume(fields.get("volume")), check_key(fields.get("key"))
        if not 0 < len(payload) <= BLOCK_BYTES:
            raise InputError(f"A block has 1 to {BLOCK_BYTES} bytes. Received: {len(payload)}")
        if checksum_block(payload) != fields.get("checksum"):
            raise OSError(errno.EIO, "the block was damaged on its way")
        self.blocks.put(volume, key, payload)
        return {}, b""

    def _get(self, fields: Fields, payload: bytes) -> Answer:
        return {}, self.blocks.get(check_volume(fields.get("volume")), check_key(fields.get("key")))

    def _drop(self, fields: Fields, payload: bytes) -> Answer:
        volume, older_than = check_volume(fields.get("volume")), fields.get("older_than", 0.0)
        if type(older_than) not in (int, float):
            raise InputError(f"older_than is a number of seconds. Received: {older_than!r:.100}")
        return {"dropped": self.blocks.drop(volume, _parse_keys(fields), older_than)}, b""

    def _keep(self, fields: Fields, payload: bytes) -> Answer:
        return {"kept": self.blocks.keep(check_volume(fields.get("volume")), _parse_keys(fields))}, b""

    def _drop_damaged(self, fields: Fields, payload: bytes) -> Answer:
        volume, key = check_volume(fields.get("volume")), check_key(fields.get("key"))
        return {"dropped": self.blocks.drop_damaged(volume, key, str(fields.get("checksum")))}, b""

    def _list_held(self, fields: Fields, payload: bytes) -> Answer:
        return {"held": self.blocks.list_held(check_volume(fields.get("volume")))}, b""

    def _list_manifests(self, fields: Fields, payload: bytes) -> Answer:
        volumes = self.blocks.list_volumes()
        held = {volume: self.blocks.list_held(volume, manifests=True) for volume in volumes}
        return {"held": {volume: found for volume, found in held.items() if found}}, b""

    def _measure(self, fields: Fields, payload: bytes) -> Answer:
        memory, disk = self.blocks.measure()
        limit = read_memory_limit(self._paths, self.node)
        return {"memory": memory, "disk": disk, "limit": limit}, b""


def read_memory_limit(paths: Paths, node: NodeId) -> int:
    """Return the bytes of memory that files may use in the store of a node."""
    given = read_settings(paths, node).file_memory
    if given is not None:
        return given
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        device = shutil.disk_usage(MEMORY).total
    except OSError:
        return 0
    return min(host // _SHARE, device // 2) // max(1, len(list_nodes_with_stores(paths)))


def _parse_keys(fields: Fields) -> list[Any]:
    keys = fields.get("keys")
    if not isinstance(keys, list) or len(keys) > _MAX_KEYS:
        raise InputError("keys is a list. Received: something else")
    return keys


def open_local_names(paths: Paths) -> MetadataStore:
    """Open the metadata store of a home without agents. Raises MetadataError."""
    make_folder(paths.home, paths.home)
    store = open_store(paths.local_files, "local", create=True)
    for each in paths.home.glob(f"{paths.local_files.name}*"):
        make_file(paths.home, each)  # in a home that is shared the others change names, too
    return store


def list_local_volumes(paths: Paths) -> list[str]:
    """Return the volumes of a home without agents that hold something. Raises MetadataError."""
    if not paths.local_files.exists():
        return []
    with contextlib.closing(open_local_names(paths)) as store:
        tree = NameTree(store)
        return [volume for volume in tree.list_volumes() if tree.list_children(volume, "", "", 1)]


def remove_local_names(paths: Paths) -> None:
    """Forget all files of a home without agents."""
    for each in paths.home.glob(f"{paths.local_files.name}*"):
        each.unlink(missing_ok=True)


def _refuse_old_names(paths: Paths, node: NodeId) -> None:
    """Raise InputError if the store has names as versions of insitu before this one kept them."""
    table = paths.old_file_names(node)
    if not table.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(table))}?mode=ro", uri=True)) as database:
            query = "SELECT DISTINCT volume FROM entries WHERE kind = 'file' ORDER BY volume"
            volumes = ", ".join(str(row[0]) for row in database.execute(query))
    except sqlite3.Error as error:
        volumes = f"volumes that can't be read ({error})"
    if volumes:
        raise InputError(
            f"This version of insitu keeps the names of files in the metadata store. Received: {table}, in "
            f"which a version before has those of {volumes}. Copy these files out with that version (`insitu "
            f"fs cp -r insitu://VOLUME DIR`), then remove {paths.files(node)} on each host"
        )
    for each in table.parent.glob(f"{table.name}*"):
        each.unlink(missing_ok=True)


def remove_file_memory(folder: Path) -> None:
    """Give back the memory that files of a store have used, if it is this user's."""
    try:
        if folder.lstat().st_uid != os.geteuid():
            return
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)
