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
from insitu.train.devices.replica_processes import Watch, can_start, one_of

__all__ = [
    "Device",
    "Watch",
    "active_backend",
    "can_start",
    "default_device",
    "list_devices",
    "log_variables",
    "one_of",
    "resolve",
    "resolve_all",
]
