"""The grid: where rows live. This is its door; everything is loaded on first use, so it costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.grid.affinity import owners_of_partition, shard_partitions
    from insitu.grid.catalog import Catalog
    from insitu.grid.datasets import Batch, Dataset, dataset
    from insitu.grid.importer import import_cache, sweep
    from insitu.grid.ledger import EpochAudit, PartitionAudit, ShardLedger, audit, read_ledgers
    from insitu.grid.store import verify_copies
    from insitu.grid.topology import bring_up, load_topology, take_down

_DOOR = {
    "Batch": "datasets",
    "Catalog": "catalog",
    "Dataset": "datasets",
    "EpochAudit": "ledger",
    "PartitionAudit": "ledger",
    "ShardLedger": "ledger",
    "audit": "ledger",
    "bring_up": "topology",
    "dataset": "datasets",
    "import_cache": "importer",
    "load_topology": "topology",
    "owners_of_partition": "affinity",
    "read_ledgers": "ledger",
    "shard_partitions": "affinity",
    "sweep": "importer",
    "take_down": "topology",
    "verify_copies": "store",
}

__all__ = [
    "Batch",
    "Catalog",
    "Dataset",
    "EpochAudit",
    "PartitionAudit",
    "ShardLedger",
    "audit",
    "bring_up",
    "dataset",
    "import_cache",
    "load_topology",
    "owners_of_partition",
    "read_ledgers",
    "shard_partitions",
    "sweep",
    "take_down",
    "verify_copies",
]


def __getattr__(name: str) -> Any:
    if name in _DOOR:
        return getattr(import_module(f"insitu.grid.{_DOOR[name]}"), name)
    raise AttributeError(f"module 'insitu.grid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
