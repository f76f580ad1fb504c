"""Compare the global batches that the tasks of a custom loop have read."""

from __future__ import annotations

from insitu.errors import InputError
from insitu.exchange import Group
from insitu.train.collectives import gather_counts
from insitu.train.fit import check_same_data
from insitu.train.replica import StepBatch

_ENDED = -1


def check_batch(group: Group, batch: StepBatch | None, step: int) -> None:
    """Raise InputError, in each task, unless all have read the same global batch for `step`, or all are at
    the end of their data, where `batch` is None. Collective."""
    own = _ENDED if batch is None else batch.parts[0].fingerprint
    fingerprints = gather_counts(group, [own] * len(group.shards))
    ended = [shard for shard, one in enumerate(fingerprints) if one == _ENDED]
    if 0 < len(ended) < len(fingerprints):
        raise InputError(
            "Each process must be given the same data: it takes its part of each global batch. Received: "
            f"{step} steps by the processes of shards {', '.join(map(str, ended))}, more by the others. For "
            "data that each process has of its own, use strategy.distribute_datasets_from_function."
        )
    check_same_data(fingerprints, f"step {step} of the loop")
