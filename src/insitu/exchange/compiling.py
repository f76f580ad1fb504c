"""Compiles insitu's C files on first use, with the machine's compiler.

The libraries are kept like Python's own compiled files: in `__pycache__` beside the source, or in the user's
cache if that isn't writable. Nothing depends on them: without a compiler, or if INSITU_NATIVE is 0, NumPy
does the same, with the same bits.
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
_SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
"""Options by the value of INSITU_SANITIZE, for tests; see `make sanitize`."""
_COMPILE_TIMEOUT = 60.0
"""Seconds that the compiler may take."""


def load(source: Path, read: Callable[[Path], T]) -> T | None:
    """Return `read(library)` for the library that `source` is compiled to, or None if there is none."""
    if os.environ.get("INSITU_NATIVE", "1") == "0":
        return None
    for folder in (_get_cache_beside, _get_user_cache):
        # A library that can't be written, read or loaded, a damaged one, or a user without a home folder: the
        # same as no library.
        with contextlib.suppress(OSError, subprocess.SubprocessError, AttributeError, RuntimeError):
            library = _find_library(source, folder(source))
            if library is not None:
                return read(library)
    warn_about_numpy()
    return None


@functools.cache
def warn_about_numpy() -> None:
    """Log once per process that the slower code is used, and what to do about it."""
    _LOG.warning(
        "[insitu] No C compiler that works was found (cc, gcc or clang): NumPy does the work of the compiled "
        "code, with the same results, but slower. Install a compiler, such as gcc, or set INSITU_NATIVE=0 to "
        "leave this line out."
    )


def _find_library(source: Path, folder: Path) -> Path | None:
    """Return the library in `folder`, compiled if it isn't there. None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    content = "|".join((source.read_text(), *_choose_options(), platform.machine(), platform.libc_ver()[1]))
    library = folder / f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        if compiler is None:
            return None
        _compile(compiler, source, library)
    return library


def _choose_options() -> tuple[str, ...]:
    sanitizer = _SANITIZERS.get(os.environ.get("INSITU_SANITIZE", ""))
    return _OPTIONS if sanitizer is None else (*_OPTIONS, "-O1", "-g", "-DINSITU_SANITIZE", *sanitizer)


def _get_cache_beside(source: Path) -> Path:
    return source.parent / "__pycache__"


def _get_user_cache(source: Path) -> Path:
    """Return the cache folder of this user. Raises PermissionError if others can write to it."""
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
        command = [compiler, *_choose_options(), "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT)
        made.replace(library)  # atomic: another process may compile it, too
