"""Strategies, and what makes Keras train under them. Of the core, it alone imports Keras and a backend.

Inner rooms, each of which may import those to its right: `evaluation`, `strategies`, `parameter_server`, the
folders in `backends`, `custom_loop`, then `placement`, `replicated` and `checkpoint` side by side, `fit`,
`elastic`, `replica`, `collectives`, then `devices` and `files` side by side, and `backends`, the interface of
these folders. Begin reading with `fit/trainer.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.train.checkpoint import BackupAndRestore
    from insitu.train.custom_loop import (
        DistributedDataset,
        DistributedIterator,
        DistributedValues,
        InputContext,
        InputOptions,
        InputReplicationMode,
        ReduceOp,
        ReplicaContext,
        RunOptions,
        get_replica_context,
        has_strategy,
        in_cross_replica_context,
    )
    from insitu.train.evaluation import SidecarEvaluator, TensorBoard
    from insitu.train.fit import StepLog, predict_into
    from insitu.train.replica import over_batch
    from insitu.train.strategies import (
        CentralStorageStrategy,
        HierarchicalCopyAllReduce,
        HybridStrategy,
        MirroredStrategy,
        ModelParallelStrategy,
        MultiWorkerMirroredStrategy,
        NcclAllReduce,
        OneDeviceStrategy,
        ParameterServerStrategy,
        ReductionToOneDevice,
        Strategy,
        TPUStrategy,
        get_strategy,
    )

__getattr__, __dir__ = export_lazily(__name__)
