"""Gives the names of `tf.distribute.experimental`, which are `insitu.experimental.X` here.

Example:
    >>> options = insitu.experimental.CommunicationOptions(timeout_seconds=60.0)
    >>> options.timeout_seconds
    60.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from insitu.base.lazy_exports import export_lazily
from insitu.base.missing_names import missing_name

if TYPE_CHECKING:
    from insitu.train.custom_loop import ValueContext
    from insitu.train.parameter_server import coordinator, partitioners
    from insitu.train.strategies.central_storage import CentralStorageStrategy
    from insitu.train.strategies.communication import (
        CollectiveHints,
        CommunicationImplementation,
        CommunicationOptions,
    )
    from insitu.train.strategies.communication import CommunicationImplementation as CollectiveCommunication
    from insitu.train.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from insitu.train.strategies.parameter_server import ParameterServerStrategy
    from insitu.train.strategies.tpu import TPUStrategy

_STRATEGIES = "insitu.train.strategies"
_load, __dir__ = export_lazily(__name__)


def __getattr__(name: str) -> Any:
    if name == "CollectiveCommunication":  # TensorFlow's old name
        return _load("CommunicationImplementation")
    if name not in __all__:
        raise missing_name("insitu.experimental", name)
    return _load(name)


__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
    "ValueContext",
    "coordinator",
    "partitioners",
]
