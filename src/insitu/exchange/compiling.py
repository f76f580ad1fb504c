"""C files of insitu, compiled by the machine's compiler on first use.

They are kept like Python's own compiled files: in `__pycache__` beside the source, or in the user's cache
where that isn't writable. Nothing depends on them: where there is no compiler, or INSITU_NATIVE is 0, the
same is done with NumPy, with the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_LOG = logging.getLogger("insitu")
_OPTIONS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")
_PATIENCE = 60.0
"""Seconds that the compiler may take."""


def load(source: Path, read: Callable[[Path], T]) -> T | None:
    """What `read` makes of the library that `source` is compiled to; None where it can't be had."""
    if os.environ.get("INSITU_NATIVE", "1") == "0":
        return None
    for folder in (_beside, _cache):
        # Not to be read, written or loaded from (a file system may forbid that), damaged, or no home at all:
        # as if there were none.
        with contextlib.suppress(OSError, subprocess.SubprocessError, AttributeError, RuntimeError):
            library = _library(source, folder(source))
            if library is not None:
                return read(library)
    warn_about_numpy()
    return None


@functools.cache
def warn_about_numpy() -> None:
    """Logs once a process that the slower code is used, and what to do about it."""
    _LOG.warning(
        "[insitu] No C compiler that works was found (cc, gcc or clang): NumPy does the work of the compiled "
        "code, with the same results, but slower. Install a compiler, such as gcc, or set INSITU_NATIVE=0 to "
        "leave this line out."
    )


def _library(source: Path, folder: Path) -> Path | None:
    """The compiled file in `folder`, made where it isn't there. None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    content = "|".join((source.read_text(), *_OPTIONS, platform.machine(), platform.libc_ver()[1]))
    library = folder / f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        if compiler is None:
            return None
        _compile(compiler, source, library)
    return library


def _beside(source: Path) -> Path:
    return source.parent / "__pycache__"


def _cache(source: Path) -> Path:
    """Of this user, whom nobody else can write for."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    folder = Path(home) / "insitu"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"Others can write to {folder}")
    return folder


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_OPTIONS, "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
        made.replace(library)  # at once, whoever else makes it
