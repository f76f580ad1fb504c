"""Files that users send: each in a private folder, bounded, and removed after a while or with the server."""

from __future__ import annotations

import collections
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from insitu.base.errors import InputError

MAX_ZIP = 256 << 20
"""Bytes of a job folder, which is as much as `insitu start` copies."""
MAX_DATA = 4 << 30
"""Bytes of a file to import."""
_MOST = 8
_MOST_FILES = 1000
_SECONDS = 3600.0
"""How long a file is kept that nobody uses."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_file_name(name: str) -> str:
    """Return the last part of a file's name, as a browser sends it, with letters that are safe anywhere.

    Raises InputError if nothing is left of it.
    """
    last = re.split(r"[/\\]", name)[-1]
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", last).lstrip(".-")[:100]
    if not _NAME.fullmatch(safe):
        raise InputError(
            f"A file needs a name of letters and digits, such as job.zip. Received: {name[:100]!r}"
        )
    return safe


class Uploads:
    """The files that were sent and not used yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._root = Path(tempfile.mkdtemp(prefix="insitu-uploads-"))
        #: By token, which nobody can guess: when the last file came, and the files.
        self._files: dict[str, tuple[float, list[Path]]] = {}
        #: How many use the files of a token now.
        self._used: collections.Counter[str] = collections.Counter()
        #: Held while any of these changes: imports end in threads of their own.
        self._lock = threading.RLock()

    def open(self, name: str, beside: str | None = None) -> tuple[str, Path, BinaryIO]:
        """Make a new file, of a new token, or of the token `beside`. Returns the token, its path and the open
        file. Raises InputError for its name, and for a token that there isn't."""
        safe = check_file_name(name)
        with self._lock:
            return self._open(safe, beside)

    def _open(self, safe: str, beside: str | None) -> tuple[str, Path, BinaryIO]:
        self._drop_old(beside)
        token = beside or secrets.token_hex(16)
        files = [] if beside is None else self.list_files(beside)
        folder = self._root / token
        path = folder / safe
        if path in files or len(files) >= _MOST_FILES:
            raise InputError(
                f"An upload has {_MOST_FILES} files at most, of different names. Received: {safe} again, "
                f"or one more"
            )
        folder.mkdir(mode=0o700, exist_ok=True)
        opened = path.open("xb")
        self._files[token] = (self._clock(), [*files, path])
        return token, path, opened

    def find(self, token: str) -> Path:
        """Return the only file of a token. Raises InputError if there is none, or more."""
        files = self.list_files(token)
        if len(files) != 1:
            raise InputError(f"This takes one file. Received: an upload of {len(files)}")
        return files[0]

    def list_files(self, token: str) -> list[Path]:
        """Return all files of a token. Raises InputError if there is none."""
        found = self._files.get(token)
        if found is None:
            raise InputError("An upload can be used once, within an hour. Send the file again")
        return list(found[1])

    def use(self, token: str) -> list[Path]:
        """Return all files of a token, which stay until `end_use`. Raises InputError if there is none."""
        with self._lock:
            files = self.list_files(token)
            self._used[token] += 1
            return files

    def end_use(self, token: str) -> None:
        """Let the files of a token be removed, once nobody else uses them."""
        with self._lock:
            self._used[token] -= 1
            self._used += collections.Counter()  # leaves out what isn't used any more

    def remove(self, token: str | None) -> None:
        """Remove the files of a token, if there are any."""
        with self._lock:
            known = token is not None and self._files.pop(token, None) is not None
        if known:
            shutil.rmtree(self._root / str(token), ignore_errors=True)

    def close(self) -> None:
        """Remove all files."""
        self._files.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def _drop_old(self, beside: str | None) -> None:
        """Remove uploads that nobody has used for long, and the oldest of too many. Uploads in use, or that
        get another file, stay."""
        now = self._clock()
        idle = {t: at for t, (at, _) in self._files.items() if not self._used[t] and t != beside}
        old = [token for token, at in idle.items() if now - at > _SECONDS]
        kept = [token for token in idle if token not in old]
        for token in (*old, *kept[: max(0, len(kept) + 1 - _MOST)]):
            self.remove(token)
