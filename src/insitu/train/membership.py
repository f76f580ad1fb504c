"""This process as a member of a strategy: which shards it trains on, and with whom."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import insitu.exchange
from insitu.context import Context
from insitu.errors import TrainingError
from insitu.exchange import Group

_ALONE = ("127.0.0.1:1",)
"""The address of a group of one, which meets nobody: nothing listens there."""

AUTO, SILENT, BAR, LINES = "auto", 0, 1, 2
"""Values of Keras' `verbose`."""


class Membership:
    """Joins the group when it is first needed: building models takes tasks unequal times."""

    def __init__(self, context: Context, transport: str) -> None:
        if context.role != "worker":
            raise TrainingError(
                "A synchronous strategy runs in workers; worker 0 is the chief. Received: a task with the "
                f"role {context.role!r}. Start the job without --{context.role}."
            )
        self.context = context
        self._transport = transport
        self._group: Group | None = None
        self._fits = 0

    @property
    def num_shards(self) -> int:
        return self.context.num_shards

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process and it has the only shard: there is nobody to exchange with."""
        return self.num_shards == 1 and len(self.context.workers) <= 1

    @property
    def feed_options(self) -> dict[str, Any]:
        context = self.context
        return {"shards": context.shards, "num_shards": context.num_shards, "seed": context.seed}

    def count_fit(self) -> int:
        """The number of this fit in the process, from 0: the same fit of a restarted script has the same."""
        self._fits += 1
        return self._fits - 1

    def group(self) -> Group:
        """The group of all workers. Raises JoinTimeout naming who is missing."""
        if self._group is None:
            context = self.context
            addresses = context.workers or _ALONE
            self._group = insitu.exchange.join(
                context.index if context.workers else 0,
                addresses,
                transport=self._transport,  # type: ignore[arg-type]
                shards=context.shards,
                num_shards=context.num_shards,
                secret=context.secret(),
                timeout=context.stall_timeout,
                stall_timeout=context.stall_timeout,
                tasks=[f"worker:{index}" for index in range(len(addresses))],
            )
            atexit.register(self._group.close)
        return self._group

    def verbosity(self, verbose: Any) -> Any:
        """One task shows progress: N bars on one terminal show nothing. Where nobody watches, a line an
        epoch instead of a bar."""
        if not self.context.is_chief:
            return SILENT
        if verbose == AUTO:
            return BAR if sys.stdout.isatty() else LINES
        return verbose
