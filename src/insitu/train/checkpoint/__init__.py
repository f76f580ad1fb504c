"""Back up a training asynchronously, and verify what is read back.

Begin reading with `backup.py`, the callback.
"""

from insitu.train.checkpoint.backup import BackupAndRestore
from insitu.train.checkpoint.memory_store import checkpoint_key
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore, find_fits

__all__ = [
    "BackupAndRestore",
    "Checkpoint",
    "CheckpointStore",
    "checkpoint_key",
    "find_fits",
]
