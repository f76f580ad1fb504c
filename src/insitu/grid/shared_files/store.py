"""What one store does with files for others, beside deciding about names."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from insitu.access import is_shared
from insitu.errors import InputError
from insitu.grid.quotas import check_quota
from insitu.grid.shared_files.blocks import BlockFolder
from insitu.grid.shared_files.entries import (
    BLOCK_BYTES,
    check_key,
    check_path,
    check_volume,
    checksum_block,
    encode_entries,
    parse_entries,
)
from insitu.grid.shared_files.names import NameTable
from insitu.grid.store_identity import list_nodes_with_stores
from insitu.grid.store_settings import read_settings
from insitu.paths import MEMORY, Paths
from insitu.spec import NodeId

Fields = Mapping[str, Any]
Answer = tuple[dict[str, Any], bytes]
PAGE = 2000
"""Entries in one answer."""
_SHARE = 8
"""One part of so many of the host's memory holds files, unless the store's settings say otherwise."""
_MAX_KEYS = 1 << 20


class FileStore:
    """Names and blocks of the store of `node`."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        self.node = node
        self._paths = paths
        #: What paths stand for.
        self.names = NameTable(paths.home, paths.file_names(node))
        memory = paths.file_memory(node) if MEMORY.is_dir() and not is_shared(paths.home) else None
        #: Their contents.
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
            "states": lambda fields, payload: ({"states": self.names.read_states()}, b""),
            "newest": self._read_newest,
            "entries": self._export,
            "merge": self._merge,
            "volumes": lambda fields, payload: ({"volumes": self.names.list_volumes()}, b""),
            "usage": self._measure,
        }

    def knows(self, kind: str) -> bool:
        """Return whether `kind` is an action of a store alone."""
        return kind in self._actions

    def act(self, kind: str, fields: Fields, payload: bytes = b"") -> Answer:
        """Do what is asked for. Raises InsituError, OSError."""
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
        return {"dropped": self.blocks.drop(check_volume(fields.get("volume")), _parse_keys(fields))}, b""

    def _keep(self, fields: Fields, payload: bytes) -> Answer:
        return {"kept": self.blocks.keep(check_volume(fields.get("volume")), _parse_keys(fields))}, b""

    def _drop_damaged(self, fields: Fields, payload: bytes) -> Answer:
        volume, key = check_volume(fields.get("volume")), check_key(fields.get("key"))
        return {"dropped": self.blocks.drop_damaged(volume, key, str(fields.get("checksum")))}, b""

    def _list_held(self, fields: Fields, payload: bytes) -> Answer:
        return {"held": self.blocks.list_held(check_volume(fields.get("volume")))}, b""

    def _read_newest(self, fields: Fields, payload: bytes) -> Answer:
        return {"newest": self.names.read_newest(check_volume(fields.get("volume")))}, b""

    def _export(self, fields: Fields, payload: bytes) -> Answer:
        after = check_path(fields.get("after", ""))
        found = self.names.export(check_volume(fields.get("volume")), after, PAGE)
        return {"entries": encode_entries(found), "whole": len(found) < PAGE}, b""

    def _merge(self, fields: Fields, payload: bytes) -> Answer:
        entries = parse_entries(fields.get("entries"))
        return {"changed": self.names.merge(check_volume(fields.get("volume")), entries)}, b""

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


def list_file_nodes(paths: Paths) -> list[NodeId]:
    """Return the nodes whose stores in this home hold names of files."""
    return [node for node in list_nodes_with_stores(paths) if paths.file_names(node).exists()]


def list_local_volumes(paths: Paths) -> list[str]:
    """Return the volumes whose names lie in the stores of this home. Raises GridError."""
    tables = [NameTable(paths.home, paths.file_names(node)) for node in list_file_nodes(paths)]
    return sorted({volume for table in tables for volume in table.list_volumes()})


def remove_file_memory(folder: Path) -> None:
    """Give back the memory that files of a store have used, if it is this user's."""
    try:
        if folder.lstat().st_uid != os.geteuid():
            return
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)
