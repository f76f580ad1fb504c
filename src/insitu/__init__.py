"""insitu: train where the data lives.

Names are loaded on first use, so that `import insitu` and the command line stay fast.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from insitu.base import config
from insitu.base._version import __version__
from insitu.base.context import Context, context
from insitu.base.disk.written_once import install_written_once
from insitu.base.lazy_exports import export_lazily
from insitu.base.missing_names import missing_name
from insitu.base.process.import_hooks import call_after_import

if TYPE_CHECKING:
    from insitu import exchange, parameters
    from insitu.base import errors
    from insitu.extensions import estimator
    from insitu.extensions.features import feature_column
    from insitu.extensions.features.adaptation import adapt
    from insitu.extensions.tracking import track
    from insitu.grid import Dataset, dataset
    from insitu.parameters import ParameterServer
    from insitu.service import import_data, run, start
    from insitu.train import (
        BackupAndRestore,
        CentralStorageStrategy,
        DistributedDataset,
        DistributedIterator,
        DistributedValues,
        HierarchicalCopyAllReduce,
        HybridStrategy,
        InputContext,
        InputOptions,
        InputReplicationMode,
        MirroredStrategy,
        ModelParallelStrategy,
        MultiWorkerMirroredStrategy,
        NcclAllReduce,
        OneDeviceStrategy,
        ParameterServerStrategy,
        ReduceOp,
        ReductionToOneDevice,
        ReplicaContext,
        RunOptions,
        SidecarEvaluator,
        StepLog,
        Strategy,
        TensorBoard,
        TPUStrategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
        over_batch,
        predict_into,
    )
    from insitu.train.parameter_server import coordinator, layers
    from insitu.train.parameter_server.script_server import Server
    from insitu.train.strategies import cluster_resolver, experimental

_load, _ = export_lazily(__name__, aliases=True)
sys.modules["insitu.config"] = config

__all__ = [
    "BackupAndRestore",
    "CentralStorageStrategy",
    "Context",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "HybridStrategy",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServer",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "SidecarEvaluator",
    "StepLog",
    "Strategy",
    "TPUStrategy",
    "TensorBoard",
    "__version__",
    "adapt",
    "cluster_resolver",
    "config",
    "context",
    "coordinator",
    "dataset",
    "errors",
    "estimator",
    "exchange",
    "experimental",
    "feature_column",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "import_data",
    "in_cross_replica_context",
    "layers",
    "over_batch",
    "parameters",
    "predict_into",
    "run",
    "start",
    "track",
]


def _set_up_backend(backend: str, settings: config.DeviceSettings) -> None:
    import importlib

    importlib.import_module("insitu.train.devices.setup").apply_settings(backend, settings)


def _register_dataset_adapter() -> None:
    import importlib

    importlib.import_module("insitu.train.fit.adapter").register_dataset_adapter()


def _install_file_access() -> None:
    import importlib

    files = importlib.import_module("insitu.train.files")
    files.install_file_access()
    files.install_whole_saves()


def _find_known_stores(paths: Any) -> Any:
    import importlib

    return importlib.import_module("insitu.cluster").find_known_stores(paths)


def _install_store_finder() -> None:
    import importlib

    importlib.import_module("insitu.grid").set_store_finder(_find_known_stores)


def _to_tf_dataset(dataset: Any) -> Any:
    import importlib

    return importlib.import_module("insitu.train.fit.tf_dataset").to_tf_dataset(dataset)


def _load_old_config(name: str) -> Any:
    import importlib

    return getattr(importlib.import_module("insitu.train.devices.old_config"), name)


config.subscribe(_set_up_backend)
config.provide_old_names(_load_old_config)
# Backends that this process imports later get the settings of its environment.
config.apply_device_settings()
# Models may be saved to insitu:// and loaded from there by Keras alone, too.
call_after_import("keras", _install_file_access)
# All tasks of a job write the same files. A standby gets its task later.
if "INSITU_TASK" in os.environ:
    install_written_once(context())
# A damaged copy is replaced by one of another host.
call_after_import("insitu.grid", _install_store_finder)


def __getattr__(name: str) -> Any:
    if name == "dataset":
        # A script that trains with Keras alone, without a strategy, may pass the dataset to fit too.
        call_after_import("keras", _register_dataset_adapter)
        from insitu.grid import register_converter

        register_converter("tensorflow", _to_tf_dataset)
    if name not in __all__:
        raise missing_name("insitu", name)
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
