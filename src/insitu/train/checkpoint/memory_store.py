"""Checkpoints in the memory of tasks' hosts, for when the disk that has the others is gone.

Replicas are equal, so nothing need be sent: while one task writes a checkpoint to disk, each other task
writes its own to its host's memory, as files that outlive it there, in the form of those on disk, checksums
included. When all begin anew the newest that any task holds whole is used.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

from insitu.context import Context
from insitu.exchange import Group
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore
from insitu.train.collectives import exchange_notes, share

_LOG = logging.getLogger("insitu")


def memory_store(context: Context, fit: int) -> CheckpointStore | None:
    """Where this task keeps checkpoints of a fit in memory; None where it isn't to, or can't."""
    folder = context.memory_checkpoint_dir
    if folder is None:
        return None
    try:
        _make_private(folder.parent)
    except OSError as error:
        _LOG.warning("No checkpoints are kept in memory: %s", error)
        return None
    # The last one suffices: the other tasks have theirs.
    return CheckpointStore(folder, fit, keep=1)


def _make_private(folder: Path) -> None:
    """Makes the folder, for this user alone. Raises OSError where another user has made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} isn't this user's own")


def newest_of_all(group: Group, own: Checkpoint | None) -> Any:
    """[position, values, more] of the newest checkpoint that any rank holds, in each rank; None where there
    is none. Of equals that of the lowest rank. Collective."""
    notes = exchange_notes(group, None if own is None else list(own.position))
    held = [(tuple(note), -rank) for rank, note in enumerate(notes) if note is not None]
    if not held:
        return None
    source = -max(held)[1]
    value = None
    if own is not None and group.rank == source:
        value = [own.position, own.values, own.more]
    return share(group, source, value)
