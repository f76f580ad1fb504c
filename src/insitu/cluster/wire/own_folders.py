"""Whether a folder of a job is this user's: what lies there is run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from insitu.base.disk.guarded_paths import WRITABLE_BY_OTHERS


def is_own_folder(folder: Path) -> bool:
    """Return whether a folder is this user's, who alone may write there. In a shared home others can make
    one, or a link, before this process does."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & WRITABLE_BY_OTHERS
    )
