"""Custom loops: `strategy.run` of a user's own step.

Begin reading with `runner.py`. There is a replica for each backend: `tensorflow.py`, `jax.py`, `torch.py`.
"""

from insitu.train.custom_loop.aggregation import ExchangeAggregation
from insitu.train.custom_loop.averaging import average_loss, scale_by_share
from insitu.train.custom_loop.distributed_dataset import DistributedDataset
from insitu.train.custom_loop.factory import make_loop_replica, make_multi_device_loop_replica
from insitu.train.custom_loop.loop_replica import LoopReplica
from insitu.train.custom_loop.per_replica import local_values
from insitu.train.custom_loop.reduction import ReduceOp, gather_values, reduce_values
from insitu.train.custom_loop.replica_check import LOOP_CHECK_INTERVAL, check_weights
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
    "CreationTracker",
    "DistributedDataset",
    "ExchangeAggregation",
    "ExchangeStep",
    "LoopAggregation",
    "LoopReplica",
    "LoopRunner",
    "LoopStep",
    "MultiDeviceExchangeStep",
    "ReduceOp",
    "RestorePlacementStep",
    "SingleFunctionStep",
    "StepModel",
    "TrainOrObserveStep",
    "average_loss",
    "check_weights",
    "gather_values",
    "local_values",
    "make_loop_replica",
    "make_multi_device_loop_replica",
    "reduce_values",
    "scale_by_share",
]
