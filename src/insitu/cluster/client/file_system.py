"""`insitu://VOLUME/PATH` as a file system of fsspec, which finds it by its entry point.

A file appears as a whole when it is closed, or replaces the one before then. `"ab"` appends: what was written
is seen by readers after each `flush`.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.client.file_cluster import open_file_cluster
from insitu.cluster.client.open_files import ReadFile, TextFile, WriteFile
from insitu.cluster.files import FileClient, RepairReport
from insitu.grid.shared_files import (
    BLOCK_BYTES,
    FILE,
    FOLDER,
    MAX_COPIES,
    Entry,
    ListedPath,
    split_path,
)

COPIES = 2
"""Copies of each block, unless the caller says otherwise."""


class InsituFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files in the memory of a cluster's nodes.

    Args:
        copies: number of nodes that store each written file: it survives the loss of all but one of them. A
            cluster of fewer nodes has one copy on each.
        cluster: the head's address as host:port; by default $INSITU_CLUSTER, else that of $INSITU_HOME.
        token_file: the file with the cluster's token, by default $INSITU_TOKEN_FILE.
        home: by default $INSITU_HOME.

    Raises:
        InputError: for names that can't be, and other values of these.
        ClusterError: if no node can be reached.
    """

    protocol = "insitu"
    root_marker = ""
    # $INSITU_HOME and $INSITU_CLUSTER may change. The client is kept, since it takes time to make.
    cachable = False

    def __init__(
        self,
        copies: int = COPIES,
        cluster: str = "",
        token_file: str = "",
        home: str = "",
        **options: Any,
    ) -> None:
        if type(copies) is not int or not 1 <= copies <= MAX_COPIES:
            raise InputError(f"copies is a whole number in [1, {MAX_COPIES}]. Received: {copies!r}")
        super().__init__(**{**options, "use_listings_cache": False})
        self.copies = copies
        paths = Paths(Path(home).absolute()) if home else Paths.default()
        self._cluster = open_file_cluster(paths, cluster, token_file)
        #: Does what is asked for.
        self.client: FileClient = self._cluster.client

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        text = text.partition("://")[2] if text.startswith("insitu://") else text
        return "/".join(name for name in text.split("/") if name)

    def _split(self, path: str) -> tuple[str, str]:
        return split_path(self._strip_protocol(path))

    def _split_file(self, path: str) -> tuple[str, str]:
        volume, name = self._split(path)
        if not name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return volume, name

    # Names

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size, type ("file" or "directory"), and of a file mtime, copies and blocks. Raises
        FileNotFoundError."""
        volume, name = self._split(path)
        if not volume:
            return _describe("", FOLDER, 0, 0.0)
        entry, kind = self.client.look(volume, name)
        if kind is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        full = f"{volume}/{name}".rstrip("/")
        if entry is None:
            return _describe(full, FOLDER, 0, 0.0)
        return _describe_entry(full, entry)

    def exists(self, path: str, **options: Any) -> bool:
        """Return whether a path is there. Raises if nobody can say, not "no": Keras would start over."""
        return self._find_type(path) is not None

    def isdir(self, path: str) -> bool:
        """Return whether a path is a folder. Raises as `exists`."""
        return self._find_type(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Return whether a path is a file. Raises as `exists`."""
        return self._find_type(path) == "file"

    def _find_type(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return None

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """List a folder, or name a file. Raises FileNotFoundError."""
        volume, name = self._split(path)
        if not volume:
            found = [_describe(each, FOLDER, 0, 0.0) for each in self.client.list_volumes()]
        else:
            found = [_describe_listed(volume, child) for child in self.client.list_children(volume, name)]
            if not found:
                itself = self.info(path)
                found = [] if itself["type"] == "directory" else [itself]
        return found if detail else [each["name"] for each in found]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """Return all files below a folder; see fsspec."""
        volume, name = self._split(path)
        if not volume or maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **options)
        below = [each for each in self.client.list_below(volume, name) if each.kind == FILE]
        if not below:
            itself = [self.info(path)] if self.isfile(path) else []
            listed = {each["name"]: each for each in itself}
        else:
            listed = {each["name"]: each for each in (_describe_listed(volume, e) for e in below)}
        return dict(sorted(listed.items())) if detail else sorted(listed)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Make a folder. Raises FileExistsError. A volume needs none."""
        volume, name = self._split(path)
        if name:
            if self.client.look_to_change(volume, name)[1] is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self.client.make_folder(volume, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and those above it. Raises FileExistsError."""
        volume, name = self._split(path)
        if not name:
            return
        if not exist_ok:
            self.mkdir(path)
        else:
            self.client.make_folder(volume, name)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder. Raises OSError for another one."""
        volume, name = self._split(path)
        if self.client.look_to_change(volume, name)[1] == FILE:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        self.client.remove(volume, name, recursive=False)

    def _rm(self, path: str) -> None:
        self.client.remove(*self._split_file(path), recursive=False)

    def rm_file(self, path: str) -> None:
        """Remove a file. Raises FileNotFoundError, IsADirectoryError."""
        volume, name = self._split_file(path)
        if self.client.look_to_change(volume, name)[1] == FOLDER:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self.client.remove(volume, name, recursive=False)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, or with `recursive` folders with all in them, each as a whole."""
        for each in path if isinstance(path, list) else [path]:
            if any(c in each for c in "*?[") and not self.exists(each):
                for found in self.expand_path(each):
                    self.rm(found, recursive=recursive)
                continue
            volume, name = self._split(each)
            if not volume:
                raise InputError("Volumes are removed one by one. Received: insitu:// alone. Name one")
            if not recursive and self.client.look_to_change(volume, name)[1] == FOLDER:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), each)
            self.client.remove(volume, name, recursive=recursive)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Move a file or a folder, as a whole within a volume; from one to another by a copy."""
        (volume, source), (other, target) = self._split(path1), self._split(path2)
        if volume != other or not source or not target:
            self.copy(path1, path2, recursive=self.isdir(path1))
            self.rm(path1, recursive=True)
            return
        if self.client.look_to_change(volume, target)[1] == FOLDER:
            target = f"{target}/{source.rpartition('/')[2]}"
        self.client.rename(volume, source, target)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy a file."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)

    def modified(self, path: str) -> Any:
        """Return when a file was changed, as a datetime."""
        from datetime import UTC, datetime

        return datetime.fromtimestamp(self.info(path)["mtime"], tz=UTC)

    created = modified

    def count_blocks(self, path: str) -> dict[NodeId, int]:
        """Return how many blocks of a file each node holds, of those that answer."""
        volume, name = self._split_file(path)
        entry = self.client.find_file(volume, name)
        return self.client.count_blocks(volume, self.client.list_blocks(volume, entry.lists, entry.blocks))

    def repair(self, path: str) -> RepairReport:
        """Make copies of a volume's blocks that are missing. Raises OSError, InsituError if a node that is
        alive doesn't answer."""
        volume, _ = self._split(path)
        if not volume:
            raise InputError("Volumes are repaired one by one. Received: insitu:// alone. Name one")
        return self._cluster.repair(volume)

    # Contents

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Open a file; see fsspec. An error within a `with` block publishes nothing."""
        if "b" in mode:
            return super().open(path, mode, **options)
        binary = super().open(path, mode.replace("t", "") + "b", **{k: options.pop(k) for k in _own(options)})
        return TextFile(binary, **{k: v for k, v in options.items() if k in _TEXT_OPTIONS})

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        volume, name = self._split_file(path)
        copies = options.pop("copies", self.copies)
        if mode == "rb":
            entry = self.client.find_file(volume, name)
            return ReadFile(self, f"{volume}/{name}", entry, **options)
        if mode not in ("wb", "ab", "xb"):
            raise InputError(f"Files of insitu:// are opened by r, w, x or a. Received: {mode!r}")
        return WriteFile(self, volume, name, mode, copies, options.pop("autocommit", True))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of a file, or a part of it."""
        volume, name = self._split_file(path)
        entry = self.client.find_file(volume, name)
        if start is None and end is None:
            blocks = self.client.list_blocks(volume, entry.lists, entry.blocks)
            return b"".join(self.client.read_blocks(volume, blocks))
        with ReadFile(self, f"{volume}/{name}", entry) as file:
            return _read_part(file, start, end)


_TEXT_OPTIONS = ("encoding", "errors", "newline")


def _own(options: dict[str, Any]) -> list[str]:
    return [name for name in options if name not in _TEXT_OPTIONS]


def _read_part(file: Any, start: int | None, end: int | None) -> bytes:
    first, last, _ = slice(start, end).indices(file.size)
    file.seek(first)
    return bytes(file.read(max(0, last - first)))


def _describe(name: str, kind: str, size: int, modified: float, copies: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "size": size, "type": "file" if kind == FILE else "directory"}
    return {**found, "mtime": modified, "created": modified, "copies": copies} if kind == FILE else found


def _describe_listed(volume: str, listed: ListedPath) -> dict[str, Any]:
    name = f"{volume}/{listed.path}"
    return _describe(name, listed.kind, listed.size, listed.modified, listed.copies)


def _describe_entry(name: str, entry: Entry) -> dict[str, Any]:
    found = _describe(name, FILE, entry.size, entry.modified, entry.copies)
    return found | {"blocks": entry.block_count, "version": entry.version}
