"""Files behind URLs that fsspec knows, such as `s3://bucket/key`, in the place of paths.

A reader of files takes a `UrlFile` as it takes a path: it opens it, and asks for its name and state. Bytes
are read in pieces, as they are needed; nothing is copied to a disk. Parts of a URL behind `?` may be a
secret, so no message shows them.
"""

from __future__ import annotations

import contextlib
import glob
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from insitu.errors import SourceError

PIECE_BYTES = 4 << 20
"""Bytes that are asked for at once."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "az": "adlfs",
}
"""The package that fsspec needs for a protocol."""


def is_url(source: str) -> bool:
    """Return whether a SOURCE is the address of something elsewhere. A path that exists is none."""
    return bool(_URL.match(source)) and not Path(source).exists()


@dataclass(frozen=True, slots=True)
class UrlState:
    """What is known of a file behind a URL, under the names of `os.stat_result`."""

    #: Bytes.
    st_size: int
    #: When it changed last, in nanoseconds since 1970; 0: the server doesn't say.
    st_mtime_ns: int
    #: A number that follows from what the server calls its version, such as an ETag.
    st_ino: int


class UrlFile:
    """A file behind a URL. It has the part of the interface of `pathlib.Path` that readers of files use."""

    def __init__(self, url: str) -> None:
        #: The URL, which may hold a secret.
        self.url = url
        self._shown = url.partition("?")[0]
        name = PurePosixPath(self._shown)
        self.name, self.suffix = name.name, name.suffix

    def __str__(self) -> str:
        return self._shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UrlFile) and self.url == other.url

    def __lt__(self, other: UrlFile) -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def resolve(self) -> UrlFile:
        return self

    def absolute(self) -> UrlFile:
        return self

    def open(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        """Open the file for reading, from any place. Raises OSError."""
        with _failures_as_os_errors(self):
            system, path = connect(self.url)
            opened = system.open(path, "rb", block_size=PIECE_BYTES, cache_type="readahead")
        return io.BufferedReader(_UrlReader(self, opened), 1 << 20)

    def stat(self) -> UrlState:
        """Return what the server says of the file now. Raises OSError."""
        with _failures_as_os_errors(self):
            system, path = connect(self.url)
            system.invalidate_cache()
            found = system.info(path)
        if found.get("type") == "directory" or found.get("size") is None:
            raise OSError(f"{self} must be a file of known size. Received: {found.get('type')}")
        mark = next((found[key] for key in ("ETag", "etag", "md5Hash", "blob_id", "ino") if key in found), "")
        changed = next((found[k] for k in ("mtime", "LastModified", "updated", "created") if k in found), 0)
        nanoseconds = (
            int(changed * 1e9) if isinstance(changed, int | float) else zlib.crc32(str(changed).encode())
        )
        return UrlState(int(found["size"]), nanoseconds, zlib.crc32(str(mark).encode()))


class _UrlReader(io.RawIOBase):
    """Reads from what fsspec has opened."""

    def __init__(self, file: UrlFile, opened: Any) -> None:
        self._file, self._opened = file, opened

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        return int(self._opened.tell())

    def readinto(self, buffer: Any) -> int:
        with _failures_as_os_errors(self._file):
            data = self._opened.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()


def connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises SourceError for one that fsspec doesn't know, or whose package isn't installed.
    """
    import fsspec

    shown = url.partition("?")[0]
    protocol = url.partition("://")[0].lower()
    if "::" in shown:
        raise SourceError(f"A URL names a file alone. Received: {shown}. Leave out what is chained by `::`")
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        install = f"`pip install {package}`" if package else f"install what fsspec needs for {protocol}"
        raise SourceError(
            f"A URL is read by the package that fsspec has for it. Received: {shown}, and on this host "
            f"{error}. On the host of `insitu import` and on each node, {install}"
        ) from None
    except ValueError as error:
        raise SourceError(
            f"A SOURCE is a path, or a URL that fsspec knows, such as s3://bucket/key. Received: {shown} "
            f"({error})"
        ) from None
    return system, str(path)


def expand_url(source: str) -> tuple[list[UrlFile], bool]:
    """Return the files that a URL names, and whether it names a folder: then they are all below it.

    Raises SourceError.
    """
    shown = source.partition("?")[0]
    try:
        with _failures_as_os_errors(UrlFile(source)):
            system, path = connect(source)
            if glob.has_magic(path) and "?" not in source:
                matches = sorted(str(match) for match in system.glob(path))
                files = [match for match in matches if system.isfile(match)]
            elif "?" not in source and system.isdir(path):
                found = sorted(str(match) for match in system.find(path))
                return [UrlFile(system.unstrip_protocol(each)) for each in found], True
            elif not system.exists(path):
                raise SourceError(f"{shown} doesn't exist")
            else:
                return [UrlFile(source if "?" in source else system.unstrip_protocol(path))], False
    except OSError as error:
        raise SourceError(f"{shown} can't be read: {error.strerror or error}") from error
    if not files:
        raise SourceError(f"No file matches {shown}")
    return [UrlFile(system.unstrip_protocol(each)) for each in files], False


@contextlib.contextmanager
def _failures_as_os_errors(file: UrlFile) -> Iterator[None]:
    """Turn whatever the package of a protocol raises into an OSError without the URL's secret."""
    try:
        yield
    except (OSError, SourceError):
        raise
    except Exception as error:  # each package has errors of its own
        text = str(error).replace(file.url, str(file))[:300]
        raise OSError(f"{type(error).__name__}: {text}") from None


def lies_behind_url(path: object) -> bool:
    """Return whether a source's file is no file of a file system."""
    return isinstance(path, UrlFile)


def arrow_input(path: Any) -> Any:
    """Return what Arrow opens a file by."""
    return path.open() if isinstance(path, UrlFile) else path
