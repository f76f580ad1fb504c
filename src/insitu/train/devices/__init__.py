"""Devices: their names on each backend, their settings, and one process for each where a backend needs that.

Begin reading with `names.py`.
"""

from insitu.train.devices.names import (
    Device,
    active_backend,
    default_device,
    list_devices,
    resolve,
    resolve_all,
)
from insitu.train.devices.placement_log import log_variables
from insitu.train.devices.replica_processes import ReplicaMonitor, can_start_replicas, join_replicas

__all__ = [
    "Device",
    "ReplicaMonitor",
    "active_backend",
    "can_start_replicas",
    "default_device",
    "join_replicas",
    "list_devices",
    "log_variables",
    "resolve",
    "resolve_all",
]
