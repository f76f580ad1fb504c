"""Files behind URLs that fsspec knows, such as `s3://bucket/key`, in the place of paths.

A reader of files takes a `UrlFile` as it takes a path: it opens it, and asks for its name and state. Bytes
are read in pieces, as they are needed; nothing is copied to a disk. Objects that a server fails to give are
asked for again. Parts of a URL behind `?`, and a password, may be a secret, so no message shows them.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from insitu.base.errors import SourceError

PIECE_BYTES = 4 << 20
"""Bytes that are asked for at once."""
_PAUSES = (0.2, 1.0, 3.0)
"""Seconds before a piece is asked for again."""
_TRY_SECONDS = 10.0
"""Seconds after which nothing is asked for again: packages that took longer have tried again themselves."""
_NO_PARTS = ("range requests", "Cannot seek")
"""The message of fsspec for a server that gives whole files alone."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "hdfs": "hdfs-native",
    "webhdfs": "requests",
    "abfs": "adlfs",
    "az": "adlfs",
}
"""The package that fsspec needs for a protocol."""
_CHANGES = ("mtime", "LastModified", "updated", "modificationTime", "modification_time", "created")
"""File systems' names for the time of the last change."""
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "ino")
"""Their names for the version of a file."""

T = TypeVar("T")


def is_url(source: str) -> bool:
    """Return whether a SOURCE is the address of something elsewhere. A path that exists is none."""
    return bool(_URL.match(source)) and not Path(source).exists()


@dataclass(frozen=True, slots=True)
class UrlState:
    """Facts about a file behind a URL, under the names of `os.stat_result`."""

    #: Bytes.
    st_size: int
    #: When it changed last, in nanoseconds since 1970. Elsewhere than on a disk: a number that follows from
    #: that and from the version, the same on all hosts; 0: the server says neither.
    st_mtime_ns: int
    #: A number that follows from what the server calls its version, such as an ETag.
    st_ino: int


class _Lasting(OSError):
    """A failure that another try doesn't change."""


_LASTING = (_Lasting, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class UrlFile:
    """A file behind a URL. It has the part of the interface of `pathlib.Path` that readers of files use."""

    def __init__(self, url: str) -> None:
        #: The URL, which may hold a secret.
        self.url = url
        self._shown = _hide_secrets(url)
        name = PurePosixPath(self._shown)
        self.name, self.suffix = name.name, name.suffix

    def __str__(self) -> str:
        return self._shown

    def clean(self, text: str) -> str:
        """Return a text, such as an error of fsspec, without what the URL hides."""
        text = text.replace(self.url, self._shown)
        for secret in _list_secrets(self.url):
            text = text.replace(secret, "...")
        return text

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
        return io.BufferedReader(_UrlReader(self, _try_again(self, self._open)), 1 << 20)

    def _open(self) -> Any:
        system, path = connect(self.url)
        # Files that hdfs-native opens with blocks can't be sought in.
        plain = type(system).__module__.startswith("hdfs_native")
        pieces = {} if plain else {"block_size": PIECE_BYTES, "cache_type": "readahead"}
        opened = system.open(path, "rb", **pieces)
        if getattr(opened, "size", None) is None:
            raise ValueError(f"its server doesn't support {_NO_PARTS[0]}")
        return opened

    def stat(self) -> UrlState:
        """Return what the server says of the file now. Raises OSError."""
        found, on_disk = _try_again(self, self._ask)
        if found.get("type") == "directory" or found.get("size") is None:
            raise OSError(f"{self} must be a file of known size. Received: {found.get('type')}")
        changed = next((found[key] for key in _CHANGES if found.get(key)), "")
        version = next((str(found[key]) for key in _VERSIONS if found.get(key)), "")
        if isinstance(changed, datetime):  # in the time zone of this host
            changed = changed.timestamp()
        if on_disk:
            when = int(float(changed or 0) * 1e9)
        else:
            when = zlib.crc32(f"{changed} {version}".encode()) if changed or version else 0
        return UrlState(int(found["size"]), when, zlib.crc32(version.encode()))

    def _ask(self) -> tuple[dict[str, Any], bool]:
        """Return what the server says, and whether that is a disk that this host sees."""
        system, path = connect(self.url)
        system.invalidate_cache()
        protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
        return system.info(path), "file" in protocols


class _UrlReader(io.RawIOBase):
    """Reads from what fsspec has opened, which is opened again after a failure."""

    def __init__(self, file: UrlFile, opened: Any) -> None:
        self._file = file
        #: The file that fsspec has opened; None after a failure.
        self._opened: Any = opened
        #: The place of the next byte to read.
        self._place = 0
        #: Bytes of the file when it was opened.
        self._size = int(opened.size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = max(0, offset + (0, self._place, self._size)[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        data = _try_again(self._file, lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def _read(self, size: int) -> bytes:
        opened, self._opened = self._opened, None
        if opened is None:
            opened = self._file._open()
        try:
            opened.seek(self._place)
            data = bytes(opened.read(size))
        except BaseException:
            with contextlib.suppress(Exception):
                opened.close()
            raise
        self._opened = opened
        return data

    def close(self) -> None:
        if not self.closed and self._opened is not None:
            self._opened.close()
        super().close()


def _hide_secrets(url: str) -> str:
    """Return a URL without a password, and without what follows `?`."""
    protocol, _, rest = url.partition("?")[0].partition("://")
    server, slash, path = rest.partition("/")
    user, at, host = server.rpartition("@")
    return f"{protocol}://{user.partition(':')[0]}{at}{host}{slash}{path}"


def _list_secrets(url: str) -> list[str]:
    """Return what messages don't show of a URL, also as packages write it."""
    parts = urlsplit(url)
    return [text for found in (parts.query, parts.password) if found for text in (found, unquote(found))]


def _try_again(file: UrlFile, act: Callable[[], T]) -> T:
    """Return what `act` does with a file, which is tried several times. Raises OSError, SourceError."""
    began = time.monotonic()
    for pause in (*_PAUSES, None):
        try:
            with _failures_as_os_errors(file):
                return act()
        except OSError as error:
            if pause is None or isinstance(error, _LASTING) or time.monotonic() - began > _TRY_SECONDS:
                raise
        time.sleep(pause)
    raise AssertionError  # the last one has returned or raised


def connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there.

    Raises SourceError for one that fsspec doesn't know, or whose package isn't installed.
    """
    import fsspec

    shown = _hide_secrets(url)
    protocol = url.partition("://")[0].lower()
    if "::" in shown:
        raise SourceError(f"A URL names a file alone. Received: {shown}. Leave out what is chained by `::`")
    try:
        _log_nothing_by_default(fsspec.get_filesystem_class(protocol))
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


def _log_nothing_by_default(kind: type) -> None:
    """Keep what a package logs, such as a traceback of each try, off the terminal: its errors become ours."""
    logger = logging.getLogger(kind.__module__.partition(".")[0])
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())


def expand_url(source: str) -> tuple[list[UrlFile], bool]:
    """Return the files that a URL names, and whether it names a folder: then they are all below it.

    Raises SourceError.
    """
    shown = _hide_secrets(source)
    try:
        with _failures_as_os_errors(UrlFile(source)):
            system, path = connect(source)
            if glob.has_magic(path) and "?" not in source:
                matches = sorted(str(match) for match in system.glob(path))
                files = [match for match in matches if system.isfile(match)]
            elif "?" not in source and system.isdir(path):
                found = sorted(str(match) for match in system.find(path))
                return [_name_file(system, source, each) for each in found], True
            else:
                system.info(path)  # `exists` calls whatever fails a no
                return [UrlFile(source) if "?" in source else _name_file(system, source, path)], False
    except FileNotFoundError as error:
        raise SourceError(f"{shown} doesn't exist, or this host's credentials don't show it") from error
    except OSError as error:
        raise SourceError(f"{shown} can't be read: {error.strerror or error}") from error
    if not files:
        raise SourceError(f"No file matches {shown}")
    return [_name_file(system, source, each) for each in files], False


def _name_file(system: Any, source: str, path: str) -> UrlFile:
    """Return the file at `path` of the file system that `source` names.

    Some know their server apart from their paths; others have no place for a user there.
    """
    url = str(system.unstrip_protocol(path))
    protocol, _, rest = url.partition("://")
    server = source.partition("://")[2].partition("/")[0]
    if rest.startswith("/") and server and protocol not in ("file", "local", "memory"):
        url = f"{protocol}://{server}{rest}"
    return UrlFile(url)


@contextlib.contextmanager
def _failures_as_os_errors(file: UrlFile) -> Iterator[None]:
    """Turn whatever the package of a protocol raises into an OSError without the URL's secrets."""
    try:
        yield
    except SourceError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.strerror is None:  # some say a path alone
            cause = error.__cause__
            # fsspec calls it that, too, if a server of HTTP fails.
            if type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", 0) not in (404, 410):
                raise OSError(f"{type(cause).__name__}: {file.clean(str(cause))[:300]}") from None
            raise FileNotFoundError(errno.ENOENT, "it isn't there") from None
        shown = file.clean(str(error))
        if shown == str(error):
            raise
        kind = next((lasting for lasting in _LASTING if isinstance(error, lasting)), OSError)
        raise kind(shown) from None
    except Exception as error:  # each package has errors of its own
        if any(words in str(error) for words in _NO_PARTS):
            raise _Lasting(
                "files are read in pieces, and its server gives whole files alone (HTTP range requests). "
                "Fetch the file, and import it from a disk"
            ) from None
        called = type(error).__name__
        lasts = isinstance(error, ValueError | TypeError) or "Credential" in called or "NotFound" in called
        text = f"{called}: {' '.join(file.clean(str(error)).split())[:300]}"
        raise (_Lasting if lasts else OSError)(text) from None


def lies_behind_url(path: object) -> bool:
    """Return whether a source's file is no file of a file system."""
    return isinstance(path, UrlFile)


def arrow_input(path: Any) -> Any:
    """Return what Arrow opens a file by."""
    return path.open() if isinstance(path, UrlFile) else path
