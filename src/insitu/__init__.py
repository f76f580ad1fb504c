"""insitu: train where the data lives.

Names are loaded on first use, so that `import insitu` and the command line stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insitu import config
from insitu._version import __version__

# Not on first use: the name is that of the module too, which would stand in its place.
from insitu.context import Context, context
from insitu.parent_death import tie_to_parent

if TYPE_CHECKING:
    from insitu import errors, exchange, parameters
    from insitu.grid import Dataset, dataset
    from insitu.parameters import ParameterServer
    from insitu.train import (
        BackupAndRestore,
        CentralStorageStrategy,
        HybridStrategy,
        MirroredStrategy,
        ModelParallelStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        ParameterServerStrategy,
        TPUStrategy,
        layers,
    )

_LAZY = {
    "BackupAndRestore": "insitu.train",
    "CentralStorageStrategy": "insitu.train",
    "Dataset": "insitu.grid",
    "HybridStrategy": "insitu.train",
    "MirroredStrategy": "insitu.train",
    "ModelParallelStrategy": "insitu.train",
    "MultiWorkerMirroredStrategy": "insitu.train",
    "OneDeviceStrategy": "insitu.train",
    "ParameterServer": "insitu.parameters",
    "ParameterServerStrategy": "insitu.train",
    "TPUStrategy": "insitu.train",
}
_MODULES = {
    "errors": "insitu.errors",
    "exchange": "insitu.exchange",
    "layers": "insitu.train.parameter_server.layers",
    "parameters": "insitu.parameters",
}

__all__ = [
    "BackupAndRestore",
    "CentralStorageStrategy",
    "Context",
    "Dataset",
    "HybridStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServer",
    "ParameterServerStrategy",
    "TPUStrategy",
    "__version__",
    "config",
    "context",
    "dataset",
    "errors",
    "exchange",
    "layers",
    "parameters",
]


def _set_up_backend(backend: str, settings: config.DeviceSettings) -> None:
    import importlib

    importlib.import_module("insitu.train.devices.setup").give_settings(backend, settings)


config.subscribe(_set_up_backend)
# Backends that this process imports from now on find what its environment asks for.
config.apply_device_settings()
# A further replica of a script ends with the process that started it, from the first moment on.
tie_to_parent()


def __getattr__(name: str) -> Any:
    import importlib
    import sys

    if name == "dataset":
        if "keras" in sys.modules:
            # A script that trains by Keras alone, without a strategy, may give the dataset to fit too.
            importlib.import_module("insitu.train.fit.adapter").teach_keras()
        return importlib.import_module("insitu.grid").dataset
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'insitu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
