"""One copy of a model, compiled so that plain arrays go in and come out, on each Keras backend.

Begin reading with `protocol.py`, the seam; `tensorflow.py`, `jax.py` and `torch.py` fill it.
"""

from insitu.train.replica.base import StepLogs, seed_offset
from insitu.train.replica.batch import SKIPPED, ShardBatch, StepBatch
from insitu.train.replica.building import build_to_predict, build_to_train, is_unbuilt
from insitu.train.replica.combination import Operation
from insitu.train.replica.factory import (
    add_up_repeated_rows,
    make_fused_replica,
    make_replica,
    wrap_train_function,
)
from insitu.train.replica.flat import Span
from insitu.train.replica.fused import FusedStep
from insitu.train.replica.leaves import count_rows, flatten_batch, map_batch, pack_batch
from insitu.train.replica.loaded_tables import mark_loaded_table, renew_optimizer, replace_optimizer
from insitu.train.replica.loss_totals import NeedsTotals
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.probe import SAMPLE_ROWS, plan_combination
from insitu.train.replica.protocol import Logs, Replica
from insitu.train.replica.record import RecordLayout
from insitu.train.replica.state import (
    ModelState,
    broadcast_state,
    check_snapshot,
    holds_table_rows,
    is_floating,
    load_snapshot,
    load_weights,
    read_state,
    to_numpy,
    view,
    views,
)
from insitu.train.replica.update_count import inner_optimizer, name_update_count
from insitu.train.replica.vocabularies import (
    check_saved_vocabularies,
    find_vocabularies,
    refuse_vocabularies,
)

__all__ = [
    "SAMPLE_ROWS",
    "SKIPPED",
    "CombinationPlan",
    "FusedStep",
    "Logs",
    "ModelState",
    "NeedsTotals",
    "Operation",
    "RecordLayout",
    "Replica",
    "ShardBatch",
    "Span",
    "StepBatch",
    "StepLogs",
    "add_up_repeated_rows",
    "broadcast_state",
    "build_to_predict",
    "build_to_train",
    "check_saved_vocabularies",
    "check_snapshot",
    "count_rows",
    "find_vocabularies",
    "flatten_batch",
    "holds_table_rows",
    "inner_optimizer",
    "is_floating",
    "is_unbuilt",
    "load_snapshot",
    "load_weights",
    "make_fused_replica",
    "make_replica",
    "map_batch",
    "mark_loaded_table",
    "name_update_count",
    "pack_batch",
    "plan_combination",
    "read_state",
    "refuse_vocabularies",
    "renew_optimizer",
    "replace_optimizer",
    "seed_offset",
    "to_numpy",
    "view",
    "views",
    "wrap_train_function",
]
