"""Compiles insitu's C files into shared libraries beside them.

The build of a wheel or of an editable install calls it as a hook. In a checkout `python hatch_build.py` does
the same. Libraries that are there already are kept.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, which needs the standard library alone
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
SOURCES = ("exchange/kernels.c", "parameters/kernels.c")
"""Below src/insitu."""


def compile_sources() -> list[Path]:
    """Compile what isn't there yet. Return all libraries."""
    sys.path.insert(0, str(ROOT / "src"))
    from insitu.base.compiled import choose_options, locate_library

    libraries = []
    for name in SOURCES:
        source = ROOT / "src/insitu" / name
        library = locate_library(source)
        if not library.exists():
            compile_library(source, library, choose_options())
        libraries.append(library)
    return libraries


def compile_library(source: Path, library: Path, options: tuple[str, ...]) -> None:
    """Compile a C file. Another process may do so at the same time."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*find_compiler(), *options, "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"The C compiler must compile {source}. Received: exit code {done.returncode} of "
                f"`{shlex.join(command)}`\n{done.stderr}Install one that works, such as gcc, or name it by CC"
            )
        made.replace(library)


def find_compiler() -> list[str]:
    """Return the command of the C compiler. Raise RuntimeError if there is none."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise RuntimeError(
        "To build insitu a C compiler is needed. Received: a PATH without cc, gcc and clang. Install one, "
        "such as gcc (Debian: apt-get install gcc libc6-dev), or name it by CC"
    )


class Hook(BuildHookInterface):
    """Puts the libraries into the wheel. An editable install finds them beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected."""
        libraries = compile_sources()
        if version == "editable":
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # called by ctypes, so for each Python
        for library in libraries:
            build_data["force_include"][str(library)] = str(library.relative_to(ROOT / "src"))


if __name__ == "__main__":
    try:
        compile_sources()
    except RuntimeError as error:
        sys.exit(str(error))
