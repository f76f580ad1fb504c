"""One copy of a model, compiled so that plain arrays go in and come out.

Begin reading with `protocol.py`, the seam; `replica.py` in the folder of each backend fills it.
"""

from insitu.train.replica.base import BaseReplica, StepLogs, seed_offset
from insitu.train.replica.batch import SKIPPED, ShardBatch, StepBatch
from insitu.train.replica.batch_losses import GLOBAL, check_global, find_rows, over_batch
from insitu.train.replica.building import build_to_predict, build_to_train, is_unbuilt
from insitu.train.replica.combination import Operation
from insitu.train.replica.flat import Span
from insitu.train.replica.fused import FusedStep
from insitu.train.replica.gradient_capture import CapturedGradients, capture_gradients
from insitu.train.replica.leaves import count_rows, flatten_batch, flatten_to_numpy, map_batch, pack_batch
from insitu.train.replica.loaded_tables import mark_loaded_table, renew_optimizer, replace_optimizer
from insitu.train.replica.loss_totals import BatchTotals, LossCounts, NeedsTotals, count_losses
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.probe import SAMPLE_ROWS, plan_combination
from insitu.train.replica.protocol import Logs, Replica
from insitu.train.replica.record import EXTRA_LOGS, RecordLayout
from insitu.train.replica.repeated_rows import tell_repeated_rows
from insitu.train.replica.state import (
    SEED_STRIDE,
    ModelState,
    broadcast_state,
    check_one_optimizer,
    check_saved_vocabularies,
    check_snapshot,
    find_seed_generators,
    find_vocabularies,
    holds_table_rows,
    is_floating,
    load_snapshot,
    load_weights,
    read_state,
    record_vocabulary_file,
    refuse_vocabularies,
    to_numpy,
    view,
    views,
)
from insitu.train.replica.step_watch import watch_step
from insitu.train.replica.update_count import (
    count_calls_of_update,
    inner_optimizer,
    name_update_count,
    read_call_count,
    read_update_count,
)
from insitu.train.replica.updated_weights import UPDATE_ADVICE, refuse_assigned, refuse_use_of_updated
