"""The only room that imports Keras and a backend. Strategies, and what makes `fit` work under them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.train.backup import BackupAndRestore
    from insitu.train.strategies.central_storage import CentralStorageStrategy
    from insitu.train.strategies.hybrid import HybridStrategy
    from insitu.train.strategies.mirrored import MirroredStrategy
    from insitu.train.strategies.model_parallel import ModelParallelStrategy
    from insitu.train.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from insitu.train.strategies.one_device import OneDeviceStrategy
    from insitu.train.strategies.parameter_server import ParameterServerStrategy
    from insitu.train.strategies.tpu import TPUStrategy

_LAZY = {
    "BackupAndRestore": "insitu.train.backup",
    "CentralStorageStrategy": "insitu.train.strategies.central_storage",
    "HybridStrategy": "insitu.train.strategies.hybrid",
    "MirroredStrategy": "insitu.train.strategies.mirrored",
    "ModelParallelStrategy": "insitu.train.strategies.model_parallel",
    "MultiWorkerMirroredStrategy": "insitu.train.strategies.multi_worker_mirrored",
    "OneDeviceStrategy": "insitu.train.strategies.one_device",
    "ParameterServerStrategy": "insitu.train.strategies.parameter_server",
    "TPUStrategy": "insitu.train.strategies.tpu",
}

__all__ = [
    "BackupAndRestore",
    "CentralStorageStrategy",
    "HybridStrategy",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'insitu.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
