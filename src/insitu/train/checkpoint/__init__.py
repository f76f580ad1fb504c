"""Back up a training asynchronously, and verify what is read back.

Begin reading with `backup.py`, the callback.
"""

from insitu.train.checkpoint.backup import BackupAndRestore

__all__ = [
    "BackupAndRestore",
]
