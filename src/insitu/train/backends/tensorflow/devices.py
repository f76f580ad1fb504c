"""Devices of TensorFlow, and their settings."""

from __future__ import annotations

import warnings
from typing import Any

from insitu.base.config import DeviceSettings
from insitu.base.errors import InputError
from insitu.train.devices import Device, already_started_error


def list_devices() -> list[Device]:
    import tensorflow as tf

    devices = []
    for kind in ("CPU", "GPU", "TPU"):
        physical = tf.config.list_physical_devices(kind)
        logical = tf.config.list_logical_devices(kind)
        virtual = len(logical) != len(physical)
        for index, device in enumerate(logical):
            details = {}
            if kind == "GPU":
                owner = physical[min(index, len(physical) - 1)]
                details = tf.config.experimental.get_device_details(owner)
            name, model = kind.lower(), str(details.get("device_name", ""))
            facts: Any = {"model": model, "virtual": virtual}
            devices.append(Device(f"{name}:{index}", name, index, "tensorflow", device.name, **facts))
    return devices


def set_up(settings: DeviceSettings) -> None:
    import tensorflow as tf

    try:
        _configure_tensorflow_devices(tf, settings)
        if settings.threads is not None:
            within, beside = settings.threads
            tf.config.threading.set_intra_op_parallelism_threads(within)
            if beside is not None:
                tf.config.threading.set_inter_op_parallelism_threads(beside)
    except RuntimeError as error:
        found = ", ".join(_short(d.name) for d in tf.config.list_logical_devices())
        requested = settings.to_environment()
        raise already_started_error("TensorFlow", "Devices, memory and threads", requested, found) from error
    if settings.soft_placement is not None:
        tf.config.set_soft_device_placement(settings.soft_placement)
    if settings.log_placement is not None:
        tf.debugging.set_log_device_placement(settings.log_placement)


def _short(name: str) -> str:
    """Return `cpu:0` for `/device:CPU:0`."""
    return name.rpartition("device:")[2].lower()


def _configure_tensorflow_devices(tf: Any, settings: DeviceSettings) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    virtual, limit = settings.virtual_devices, settings.memory_limit
    make = tf.config.LogicalDeviceConfiguration
    if virtual is not None and virtual[0] == "cpu":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [make()] * virtual[1])
    if virtual is not None and virtual[0] == "gpu":
        _require_gpu(gpus, "virtual GPUs")
        if limit is None:
            raise InputError(
                "Virtual GPUs on TensorFlow need a memory limit for each. Received: None. Call "
                "insitu.base.config.set_memory_limit, or pass --memory-limit."
            )
        tf.config.set_logical_device_configuration(gpus[0], [make(memory_limit=limit)] * virtual[1])
        gpus = gpus[1:]
    if limit is not None and (gpus or virtual is None or virtual[0] == "cpu"):
        _require_gpu(gpus, "a memory limit", soft=True)
        for gpu in gpus:
            tf.config.set_logical_device_configuration(gpu, [make(memory_limit=limit)])
    elif settings.memory_growth is not None:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, settings.memory_growth)


def _require_gpu(gpus: Any, what: str, *, soft: bool = False) -> None:
    if gpus:
        return
    if not soft:
        raise InputError(f"A GPU is needed for {what}. Received: 0 GPUs on this machine. Use cpu:N.")
    warnings.warn(f"There is no GPU: {what} has no effect.", stacklevel=2)


def start_tpu(tpu: Any) -> None:
    """See `Backend`."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu) if isinstance(tpu, str) else tpu
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
