"""Back up a training asynchronously, and verify what is read back.

Begin reading with `backup.py`, the callback.
"""

from insitu.train.checkpoint.backup import BackupAndRestore, checkpoint_key
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore, find_fits
