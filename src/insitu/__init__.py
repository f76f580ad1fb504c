"""insitu: train where the data lives.

A data set is imported once, into partitions on the nodes. Workers train Keras models beside them:

    >>> import insitu
    >>> versions = insitu.import_data("digits", {"image": images, "label": labels})
    >>> strategy = insitu.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     model = make_model()
    >>> history = model.fit(insitu.dataset("digits").shuffle().batch(32), epochs=3, verbose=0)

`help(insitu.NAME)` describes a name, with an example. Names are loaded on first use.

Data
    import_data                  read files, tables or arrays into a cache
    dataset, Dataset             the rows of a cache, as batches
    adapt                        adapt Keras' preprocessing layers to a cache
    feature_column               feature columns, as TensorFlow has them
    predict_into                 write predictions into a file, a cache or a table

Jobs
    run                          run a function on several workers, and get what it returns
    start                        start a script on several workers
    context, Context             which task of which job this process is
    track                        log a training for an experiment tracker
    errors                       all errors that insitu raises on purpose

Strategies
    MultiWorkerMirroredStrategy  a replica in each worker
    MirroredStrategy             a replica on each device of a machine
    CentralStorageStrategy       several devices, one copy of the variables
    OneDeviceStrategy            one device
    TPUStrategy                  the cores of TPUs
    ModelParallelStrategy        one model over many devices
    ParameterServerStrategy      variables on parameter servers
    HybridStrategy               tables on servers, other variables in each worker
    Strategy                     what all of them have in common
    layers                       embeddings whose rows live on parameter servers

Callbacks and evaluation
    BackupAndRestore             save the whole state of a training, and restore it
    StepLog                      print a line every N steps
    TensorBoard                  write event files
    SidecarEvaluator             score checkpoints beside a training
    estimator                    train by global steps, as tf.estimator did
    over_batch                   say which rows a loss needs

Custom loops
    get_strategy, has_strategy   the strategy whose scope this is
    get_replica_context, in_cross_replica_context, ReplicaContext
                                 the replica that runs
    DistributedDataset, DistributedIterator, DistributedValues
                                 rows and values of several replicas
    ReduceOp                     how values of replicas become one
    coordinator                  schedule functions on workers

Names that scripts for tf.distribute use
    cluster_resolver, experimental, Server
                                 clusters, options, servers
    InputContext, InputOptions, InputReplicationMode, RunOptions
                                 who reads which data
    HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
                                 how gradients are added up

Below
    config                       devices, memory and threads of the backend
    exchange                     move buffers between tasks, without Keras
    parameters, ParameterServer  variables on servers, without Keras
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
