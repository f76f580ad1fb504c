"""Custom loops: `strategy.run` of a user's own step.

Begin reading with `runner.py`. `loop.py` in the folder of each backend has the replicas.
"""

from insitu.train.custom_loop.averaging import average_loss, current_share, scale_by_share, scale_rows
from insitu.train.custom_loop.distributed_dataset import DistributedDataset, DistributedIterator
from insitu.train.custom_loop.epoch_log import EpochLog
from insitu.train.custom_loop.input_context import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
    ValueContext,
    is_per_replica,
)
from insitu.train.custom_loop.loop_replica import CompiledGradientMixin, LoopReplica
from insitu.train.custom_loop.per_replica import PerReplica, local_values, make_values
from insitu.train.custom_loop.reduction import (
    AnyReduceOp,
    ExchangeAggregation,
    ReduceOp,
    gather_values,
    reduce_values,
)
from insitu.train.custom_loop.replica_check import LOOP_CHECK_INTERVAL, check_same_place, check_weights
from insitu.train.custom_loop.replica_context import (
    ReplicaContext,
    find_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
    open_scope,
)
from insitu.train.custom_loop.runner import LoopAggregation, LoopRunner
from insitu.train.custom_loop.scope import CreationTracker
from insitu.train.custom_loop.step_model import StepModel
from insitu.train.custom_loop.steps import (
    ExchangeStep,
    LoopStep,
    MultiDeviceExchangeStep,
    Outputs,
    RestorePlacementStep,
    SingleFunctionStep,
    TrainOrObserveStep,
)
from insitu.train.custom_loop.tracing import DeferredUpdates
from insitu.train.custom_loop.worker_feed import WorkerFeed, cut_for_replicas

DistributedValues = PerReplica
"""TensorFlow's name for values that differ by replica."""
