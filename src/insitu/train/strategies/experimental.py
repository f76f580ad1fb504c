"""Gives the names of `tf.distribute.experimental`, which are `insitu.experimental.X` here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.train.parameter_server import coordinator, partitioners
    from insitu.train.strategies.central_storage import CentralStorageStrategy
    from insitu.train.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from insitu.train.strategies.parameter_server import ParameterServerStrategy
    from insitu.train.strategies.tpu import TPUStrategy

_STRATEGIES = "insitu.train.strategies"
__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "insitu.train.parameter_server": ("coordinator", "partitioners"),
        f"{_STRATEGIES}.central_storage": ("CentralStorageStrategy",),
        f"{_STRATEGIES}.multi_worker_mirrored": ("MultiWorkerMirroredStrategy",),
        f"{_STRATEGIES}.parameter_server": ("ParameterServerStrategy",),
        f"{_STRATEGIES}.tpu": ("TPUStrategy",),
    },
)

__all__ = [
    "CentralStorageStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    "coordinator",
    "partitioners",
]
