"""Score checkpoints beside a training.

Begin reading with `sidecar.py`.
"""

from insitu.train.evaluation.event_files import EventFile
from insitu.train.evaluation.sidecar import BATCH_SIZE, SidecarEvaluator, expect_ends

__all__ = [
    "BATCH_SIZE",
    "EventFile",
    "SidecarEvaluator",
    "expect_ends",
]
