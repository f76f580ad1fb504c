"""Custom loops: what `strategy.run` makes out of a user's own step, and what it gives back."""

from insitu.train.loops.agreement import CHECK_EVERY, check_weights
from insitu.train.loops.averaging import average_loss, scale_by_share
from insitu.train.loops.backends import make_loop_devices, make_loop_replica
from insitu.train.loops.batches import DistributedDataset
from insitu.train.loops.exchanged import ExchangedTrainer
from insitu.train.loops.program import StepModel
from insitu.train.loops.reduction import ReduceOp, gather_values, reduce_values
from insitu.train.loops.runner import Layout, LoopTrainer, Runner
from insitu.train.loops.scope import Scope
from insitu.train.loops.steps import ExchangedStep, LoopStep, OneFunctionStep, SettledStep, SideBySideStep
from insitu.train.loops.values import PerReplica, local_values

__all__ = [
    "CHECK_EVERY",
    "DistributedDataset",
    "ExchangedStep",
    "ExchangedTrainer",
    "Layout",
    "LoopStep",
    "LoopTrainer",
    "OneFunctionStep",
    "PerReplica",
    "ReduceOp",
    "Runner",
    "Scope",
    "SettledStep",
    "SideBySideStep",
    "StepModel",
    "average_loss",
    "check_weights",
    "gather_values",
    "local_values",
    "make_loop_devices",
    "make_loop_replica",
    "reduce_values",
    "scale_by_share",
]
