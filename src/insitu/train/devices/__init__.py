"""Devices: their names on each backend, and their settings.

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
from insitu.train.devices.setup import device_of, log_variables
