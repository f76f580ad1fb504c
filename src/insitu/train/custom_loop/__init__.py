"""Custom loops: `strategy.run` of a user's own step.

Begin reading with `runner.py`. There is a replica for each backend: `tensorflow.py`, `jax.py`, `torch.py`.
"""

from insitu.train.custom_loop.aggregation import ExchangeAggregation
from insitu.train.custom_loop.averaging import average_loss, scale_by_share
from insitu.train.custom_loop.distributed_dataset import DistributedDataset
from insitu.train.custom_loop.factory import (
    leave_graph,
    make_loop_replica,
    make_multi_device_loop_replica,
    out_of_range_error,
    prepare_backend,
)
from insitu.train.custom_loop.loop_replica import LoopReplica
from insitu.train.custom_loop.per_replica import PerReplica, local_values
from insitu.train.custom_loop.reduction import AnyReduceOp, ReduceOp, gather_values, reduce_values
from insitu.train.custom_loop.replica_check import LOOP_CHECK_INTERVAL, check_weights
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
    RestorePlacementStep,
    SingleFunctionStep,
    TrainOrObserveStep,
)

__all__ = [
    "LOOP_CHECK_INTERVAL",
    "AnyReduceOp",
    "CreationTracker",
    "DistributedDataset",
    "ExchangeAggregation",
    "ExchangeStep",
    "LoopAggregation",
    "LoopReplica",
    "LoopRunner",
    "LoopStep",
    "MultiDeviceExchangeStep",
    "PerReplica",
    "ReduceOp",
    "ReplicaContext",
    "RestorePlacementStep",
    "SingleFunctionStep",
    "StepModel",
    "TrainOrObserveStep",
    "average_loss",
    "check_weights",
    "find_strategy",
    "gather_values",
    "get_replica_context",
    "has_strategy",
    "in_cross_replica_context",
    "leave_graph",
    "local_values",
    "make_loop_replica",
    "make_multi_device_loop_replica",
    "open_scope",
    "out_of_range_error",
    "prepare_backend",
    "reduce_values",
    "scale_by_share",
]
