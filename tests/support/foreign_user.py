"""Runs a function as another user, where the tests run as root."""

from __future__ import annotations

import grp
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def name_own_group() -> str:
    """Return the name of this process's group; skip the test if it has none, as in a container."""
    try:
        return grp.getgrgid(os.getgid()).gr_name
    except KeyError:
        pytest.skip("this user's group has no name")


def run_as(function: Callable[[], object], user: int = NOBODY, group: int = NOBODY) -> str:
    """Return the text of what `function` returns, or of what it raises, in a child of that user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            os.umask(0o022)
            try:
                text = str(function())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writer, text.encode()[:60000])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text


def open_folder() -> Iterator[Path]:
    """Yield a folder that every user can reach, unlike those of pytest."""
    import shutil

    folder = Path(tempfile.mkdtemp(prefix="insitu-open-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
