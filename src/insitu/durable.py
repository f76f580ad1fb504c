"""What every room that writes to a disk needs: what "no room" is, and names that survive a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The system's numbers for "no room": of the device, of the user's quota, of the limit on a file's size."""


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
