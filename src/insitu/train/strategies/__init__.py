"""The strategies: the public classes, one module each.

Begin reading with `base.py`, then `synchronous.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.train.strategies.base import Strategy
    from insitu.train.strategies.central_storage import CentralStorageStrategy
    from insitu.train.strategies.communication import (
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
    )
    from insitu.train.strategies.current import get_strategy
    from insitu.train.strategies.hybrid import HybridStrategy
    from insitu.train.strategies.mirrored import MirroredStrategy
    from insitu.train.strategies.model_parallel import ModelParallelStrategy
    from insitu.train.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from insitu.train.strategies.one_device import OneDeviceStrategy
    from insitu.train.strategies.parameter_server import ParameterServerStrategy
    from insitu.train.strategies.tpu import TPUStrategy

__getattr__, __dir__ = export_lazily(__name__)
