"""Score checkpoints beside a training.

Begin reading with `sidecar.py`.
"""

from insitu.train.evaluation.checkpoints import (
    Candidate,
    Loaded,
    assign_iterations,
    find_checkpoints,
    load_checkpoint,
)
from insitu.train.evaluation.event_files import EventFile
from insitu.train.evaluation.sidecar import BATCH_SIZE, SidecarEvaluator, expect_ends
from insitu.train.evaluation.tensorboard import TensorBoard
