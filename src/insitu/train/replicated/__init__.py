"""Replicas on several devices of one process.

Begin reading with `step.py`.
"""

from insitu.train.replicated.single_device import placed
from insitu.train.replicated.step import Devices, DevicesStep, ParallelReplica, ParallelStep

__all__ = [
    "Devices",
    "DevicesStep",
    "ParallelReplica",
    "ParallelStep",
    "placed",
]
