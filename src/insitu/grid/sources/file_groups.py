"""Several small files as one source, such as images of a folder.

A reader of files takes a `FileGroup` in the place of a path: it asks for its name and state, and opens its
files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError, SourceError
from insitu.base.wording import format_count
from insitu.grid.sources.urls import UrlFile, UrlState, is_url

MOST_FILES = 256
"""Files of a group of one folder. A node of a cluster reads a group at a time."""
_REQUESTS_AT_ONCE = 16

Member = Path | UrlFile


class FileGroup:
    """Files that follow each other. It has the part of the interface of `pathlib.Path` that imports use."""

    def __init__(self, files: Sequence[Member]) -> None:
        self.files = tuple(files)
        self.name, self.suffix = files[0].name, files[0].suffix
        self.is_url = isinstance(files[0], UrlFile)

    @property
    def address(self) -> str:
        """The text by which other hosts open the same files, which are of one folder."""
        return json.dumps([folder_of(self.files[0]), *map(_last_part, self.files)])

    @classmethod
    def parse(cls, text: str) -> FileGroup:
        """Return the group of an address. Raises InputError for any other text."""
        try:
            folder, *names = json.loads(text)
            if not (names and isinstance(folder, str) and all(isinstance(name, str) for name in names)):
                raise ValueError("it names no files")
        except (ValueError, TypeError) as error:
            raise InputError(
                f"A group of files has a folder and names. Received: {text!r:.100} ({error})"
            ) from None
        kind: Any = UrlFile if is_url(folder) else Path
        return cls([kind(f"{folder}/{name}") for name in names])

    def __str__(self) -> str:
        first, *others = map(str, self.files)
        return f"{first} and the {format_count(len(others), 'file')} behind it" if others else first

    def stat(self) -> UrlState:
        """Return the bytes of all files, and numbers that change if one of them does.

        Raises SourceError, which names the file that can't be read.
        """
        found = self._ask()
        times = [(each.st_size, each.st_mtime_ns) for each in found]
        return UrlState(
            sum(each.st_size for each in found),
            zlib.crc32(repr(times).encode()),
            zlib.crc32(repr([each.st_ino for each in found]).encode()),
        )

    def sizes(self) -> list[int]:
        """Return the bytes of each file. Raises SourceError."""
        return [each.st_size for each in self._ask()]

    def _ask(self) -> list[UrlState | os.stat_result]:
        if not self.is_url:
            return [_ask(file) for file in self.files]
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="insitu-stat") as executor:
            return list(executor.map(_ask, self.files))


def _ask(file: Member) -> UrlState | os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise SourceError(f"{file} can't be read: {error.strerror or error}") from error


def read_file(file: Member) -> bytes:
    """Return the bytes of a file. Raises SourceError."""
    try:
        with file.open("rb") as opened:
            return opened.read()
    except OSError as error:
        raise SourceError(f"{file} can't be read: {error.strerror or error}") from error


def folder_of(file: Member) -> str:
    """Return the folder of a file: a path or a URL, without a slash at its end."""
    return (file.url if isinstance(file, UrlFile) else str(file)).rpartition("/")[0]


def _last_part(file: Member) -> str:
    return file.url.rpartition("/")[2] if isinstance(file, UrlFile) else file.name


def group_files(files: Sequence[Member]) -> list[FileGroup]:
    """Return groups of files by their folders, in the order of their first files."""
    folders: dict[str, list[Member]] = {}
    for file in files:
        folders.setdefault(folder_of(file), []).append(file)
    return [
        FileGroup(found[first : first + MOST_FILES])
        for found in folders.values()
        for first in range(0, len(found), MOST_FILES)
    ]
