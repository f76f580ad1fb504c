"""Devices: their names on each backend, and their settings.

Begin reading with `names.py`.
"""

from insitu.train.devices.names import (
    Device,
    default_device,
    list_devices,
    resolve,
    resolve_all,
)
from insitu.train.devices.setup import already_started_error, device_of, log_variables, print_line
