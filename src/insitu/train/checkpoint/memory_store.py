"""Checkpoints in the memory of the tasks' hosts, for a job whose disk with checkpoints is lost.

Replicas are equal, so nothing needs to be sent. While one task writes a checkpoint to disk, each other task
writes its own to its host's memory. These are files that outlive the task, in the format of those on disk,
with checksums. When all tasks restart, they use the newest whole checkpoint that any of them holds.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

from insitu.context import Context
from insitu.exchange import Group
from insitu.signatures import derive_key, read_user_key
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore
from insitu.train.collectives import all_gather_json, broadcast_value

_LOG = logging.getLogger("insitu")


def checkpoint_key(context: Context) -> bytes:
    """Return the key that checkpoints in the job's own folders are signed with; outside a job, the user's."""
    return derive_key(context.signing_secret() or read_user_key(context.paths), "checkpoints")


def memory_store(context: Context, fit: int) -> CheckpointStore | None:
    """Return the store of this task's checkpoints of a fit in memory, or None where there shall be none, or
    can't be."""
    folder = context.memory_checkpoint_dir
    if folder is None:
        return None
    try:
        _make_private(folder.parent)
    except OSError as error:
        _LOG.warning("Checkpoints can't be kept in memory: %s", error)
        return None
    # One suffices: the other tasks have theirs.
    return CheckpointStore(folder, fit, keep=1, key=checkpoint_key(context))


def _make_private(folder: Path) -> None:
    """Make the folder for this user alone. Raises OSError where another user has made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must belong to this user alone (mode 700)")


def broadcast_newest(group: Group, own: Checkpoint | None) -> Any:
    """Return [position, values, more] of the newest checkpoint that any rank holds, in each rank; None where
    there is none. Of equally new ones that of the lowest rank. Collective."""
    notes = all_gather_json(group, None if own is None else list(own.position))
    held = [(tuple(note), -rank) for rank, note in enumerate(notes) if note is not None]
    if not held:
        return None
    source = -max(held)[1]
    value = None
    if own is not None and group.rank == source:
        value = [own.position, own.values, own.more]
    return broadcast_value(group, source, value)
