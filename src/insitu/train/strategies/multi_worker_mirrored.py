"""Synchronous training by many workers, each with a copy of the model."""

from __future__ import annotations

from typing import Literal

from insitu.context import Context
from insitu.errors import TrainingError
from insitu.train.strategies.base import Strategy

Communication = Literal["auto", "ring", "xla"]


class MultiWorkerMirroredStrategy(Strategy):
    """One replica for each shard; a step's gradient is the mean over all rows of the global batch.

    The two-phase step: a compiled function gives the gradients, the exchange combines them in shard order,
    a compiled function applies them. With the same seed, number of shards and backend threads the weights
    are the same bits on one process and on many. In a plain process, outside a job, it is one replica over
    all partitions.

    Args:
        communication: `"ring"` is insitu's exchange; `"auto"` chooses, which in this version is `"ring"`.
            `"xla"` isn't there yet.
        context: who this process is; read from the environment by default.

    Raises:
        TrainingError: for an unknown communication, or a task that isn't a worker.
    """

    def __init__(self, communication: Communication = "auto", *, context: Context | None = None) -> None:
        if communication not in ("auto", "ring"):
            raise TrainingError(
                f"communication is 'auto' or 'ring' in this version. Received: {communication!r}"
            )
        super().__init__(context=context)
