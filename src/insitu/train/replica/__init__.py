"""One copy of a model, compiled so that plain arrays go in and come out, on each Keras backend.

Begin reading with `protocol.py`, the seam; `tensorflow.py`, `jax.py` and `torch.py` fill it.
"""

from insitu.train.replica.base import seed_offset
from insitu.train.replica.batch import SKIPPED, Part, StepBatch
from insitu.train.replica.building import build_to_predict, build_to_train
from insitu.train.replica.factory import fit_into_trainer, make_replica
from insitu.train.replica.flat import Span
from insitu.train.replica.fused import FusedStep, make_fused_replica
from insitu.train.replica.leaves import leaves_of, map_leaves, number_of_rows
from insitu.train.replica.protocol import Logs, Replica
from insitu.train.replica.record import RecordLayout
from insitu.train.replica.state import (
    ModelState,
    broadcast_state,
    check_snapshot,
    check_trainable_by_shards,
    holds_rows_of_table,
    load_snapshot,
    read_state,
    to_numpy,
    view,
    views,
)

__all__ = [
    "SKIPPED",
    "FusedStep",
    "Logs",
    "ModelState",
    "Part",
    "RecordLayout",
    "Replica",
    "Span",
    "StepBatch",
    "broadcast_state",
    "build_to_predict",
    "build_to_train",
    "check_snapshot",
    "check_trainable_by_shards",
    "fit_into_trainer",
    "holds_rows_of_table",
    "leaves_of",
    "load_snapshot",
    "make_fused_replica",
    "make_replica",
    "map_leaves",
    "number_of_rows",
    "read_state",
    "seed_offset",
    "to_numpy",
    "view",
    "views",
]
