"""Replicas on several devices of one process.

Begin reading with `step.py`.
"""

from insitu.train.replicated.single_device import pin_step
from insitu.train.replicated.step import (
    DeviceReplicas,
    MultiDeviceReplica,
    MultiDeviceStep,
    SingleProcessStep,
)
