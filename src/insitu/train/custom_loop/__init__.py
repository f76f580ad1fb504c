"""Custom loops: `strategy.run` of a user's own step.

Begin reading with `runner.py`. There is a replica for each backend: `tensorflow.py`, `jax.py`, `torch.py`.
"""

from insitu.train.custom_loop.averaging import average_loss, scale_by_share
from insitu.train.custom_loop.distributed_dataset import DistributedDataset
from insitu.train.custom_loop.exchanged import ExchangedTrainer
from insitu.train.custom_loop.factory import make_loop_devices, make_loop_replica
from insitu.train.custom_loop.loop_replica import LoopReplica
from insitu.train.custom_loop.per_replica import local_values
from insitu.train.custom_loop.program import StepModel
from insitu.train.custom_loop.reduction import ReduceOp, gather_values, reduce_values
from insitu.train.custom_loop.replica_check import CHECK_EVERY, check_weights
from insitu.train.custom_loop.runner import LoopTrainer, Runner
from insitu.train.custom_loop.scope import Scope
from insitu.train.custom_loop.steps import (
    ExchangedStep,
    LoopStep,
    OneFunctionStep,
    SettledStep,
    SideBySideStep,
    TwoWayStep,
)

__all__ = [
    "CHECK_EVERY",
    "DistributedDataset",
    "ExchangedStep",
    "ExchangedTrainer",
    "LoopReplica",
    "LoopStep",
    "LoopTrainer",
    "OneFunctionStep",
    "ReduceOp",
    "Runner",
    "Scope",
    "SettledStep",
    "SideBySideStep",
    "StepModel",
    "TwoWayStep",
    "average_loss",
    "check_weights",
    "gather_values",
    "local_values",
    "make_loop_devices",
    "make_loop_replica",
    "reduce_values",
    "scale_by_share",
]
