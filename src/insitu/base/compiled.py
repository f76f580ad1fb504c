"""Finds the libraries that `hatch_build.py` has compiled from insitu's C files.

A library is stored beside its source. Its name holds a digest of the source, of the compiler's options and of
the type of machine, so that one of another source or machine is never loaded. Nothing is compiled for one
processor alone: a library chooses its vector instructions when it is loaded, and has the same bits on each.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from insitu.base.errors import MissingLibrary

T = TypeVar("T")
_OPTIONS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")
_SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
"""Options by the value of INSITU_SANITIZE, for tests; see `make sanitize`."""


def choose_options() -> tuple[str, ...]:
    """Return the options for the compiler."""
    sanitizer = _SANITIZERS.get(os.environ.get("INSITU_SANITIZE", ""))
    return _OPTIONS if sanitizer is None else (*_OPTIONS, "-O1", "-g", "-DINSITU_SANITIZE", *sanitizer)


def locate_library(source: Path) -> Path:
    """Return the path of the library of a C file, whether it exists or not."""
    content = "|".join((source.read_text(), *choose_options(), platform.machine()))
    return source.with_name(f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so")


def load_library(source: Path, read: Callable[[Path], T]) -> T:
    """Return `read(library)` for the library of a C file. Raise MissingLibrary if it can't be loaded."""
    library = locate_library(source)
    try:
        if library.exists():
            return read(library)
        reason = "there is none of this version for this type of machine"
    except (OSError, AttributeError) as error:
        reason = f"it can't be loaded ({error})"
    checkout = source.parents[3]
    if (checkout / "hatch_build.py").exists():
        remedy = f"Run `python {checkout / 'hatch_build.py'}`, which needs a C compiler, such as gcc"
    else:
        remedy = "Install insitu again on this machine: `pip install --force-reinstall --no-deps insitu`"
    raise MissingLibrary(f"insitu needs the compiled library {library}. Received: {reason}. {remedy}")
