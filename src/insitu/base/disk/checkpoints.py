"""Distinguishes checkpoints that are damaged from those that can't be used now.

Workers and servers share it.
A damaged one is passed over. One that may be right never is: training would start over, or go back, without
need, and remove it later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from insitu.base.disk.durable import NO_ROOM
from insitu.base.disk.signatures import OtherKey
from insitu.base.errors import CheckpointError, ClusterError, StorageFull

_DAMAGED: tuple[type[Exception], ...] = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(OverflowError, RecursionError, SyntaxError),
    *(FileNotFoundError, IsADirectoryError, NotADirectoryError),
)
"""Errors that reading a damaged checkpoint raises. All else says of a storage that it fails now."""
PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between two attempts to read from a storage that fails."""
AWAY_SECONDS = 300.0
"""Seconds for which files of `insitu://` are tried if its head is unreachable."""
T = TypeVar("T")
_LOG = logging.getLogger("insitu")


class NotDamaged(CheckpointError):
    """Raised for a checkpoint that can't be used, but may be right: it was signed with another key, or its
    storage fails now."""


def list_folder(folder: Path) -> list[str]:
    """Return the content of a folder; nothing if it isn't there. Raises OSError if the disk fails, which
    pathlib takes for none."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def try_again(read: Callable[[], T], path: object, failing: tuple[type[Exception], ...] = (Exception,)) -> T:
    """Return what `read` does, which is called again for a while if it raises `failing`: the packages of file
    systems raise errors of their own. Raises CheckpointError."""
    pauses, until = iter(PAUSES), time.monotonic() + AWAY_SECONDS
    is_said = False
    while True:
        try:
            return read()
        except CheckpointError:
            raise
        except failing as error:
            pause = next(pauses, None)
            if pause is None and isinstance(error, ClusterError) and time.monotonic() < until:
                pause = PAUSES[-1]
                if not is_said:
                    _LOG.warning("%s is tried for %.0f s: %s", path, AWAY_SECONDS, error)
                    is_said = True
            if pause is None:
                raise NotDamaged(
                    f"Checkpoints must be readable before training continues. Received: {error!r} for "
                    f"{path}. "
                    "Nothing was removed. Make that storage available, then start again, or `insitu resume`"
                ) from error
            time.sleep(pause)


@contextlib.contextmanager
def explained_reading(path: object, *damaged: type[Exception], remedy: str = "") -> Iterator[None]:
    """Raise NotDamaged for a checkpoint that was signed with another key, and CheckpointError for one that is
    damaged, which `damaged` say, too."""
    try:
        yield
    except OtherKey as error:
        raise NotDamaged(
            f"Checkpoints are read back by the user, or the job, that wrote them. Received: {path}, which "
            "was signed with another key. If it is yours, copy the file of $INSITU_HOME/keys from where it "
            "was written; otherwise give another directory."
        ) from error
    except _DAMAGED + damaged as error:
        raise CheckpointError(f"The checkpoint {path} can't be read: {error}.{remedy}") from error


@contextlib.contextmanager
def explained_writing(folder: object) -> Iterator[None]:
    """Raise StorageFull or CheckpointError for an OSError of writing a checkpoint to `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"No room is left for a checkpoint in {folder}. The last published one stays. Free some "
                "space, or save less often or elsewhere."
            ) from error
        raise CheckpointError(
            f"A checkpoint can't be written to {folder}: {error}. The last published one stays. Check that "
            "disk or folder, or save elsewhere; `insitu resume` lets a job continue from the last one"
        ) from error
