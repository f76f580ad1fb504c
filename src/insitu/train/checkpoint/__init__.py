"""Backups of a training: written behind it, verified when they are read back.

Begin reading with `backup.py`, the callback.
"""

from insitu.train.checkpoint.backup import BackupAndRestore

__all__ = [
    "BackupAndRestore",
]
