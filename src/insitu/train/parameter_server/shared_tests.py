"""Combine the tests of all workers over an `insitu.dataset`, of which each has its own shards (mode sync)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from insitu.train.elastic import LoopPosition
from insitu.train.parameter_server.session import ParameterServerSession
from insitu.train.replica import ShardBatch

_LOG = logging.getLogger("insitu")
_NEVER = 1 << 62
"""The number of a push that no worker comes to."""


class SharedTests:
    """Gives each worker the records of all shards in each step of a test.

    In a fit, workers come to the same tests between the same pushes. So a test is named by the number of the
    push that follows, the depth of the call, and its number among those. A worker that was restarted goes on
    behind its pushes, maybe past a test. Between fits it comes to all tests again.
    """

    def __init__(self, session: ParameterServerSession) -> None:
        self._session = session
        #: The fit under way, or that which ended last. Written by `begin_fit` and `end_fit`.
        self._fit = ""
        self._is_in_fit = False
        #: Tests since the last push, by depth of the call. Written by `_begin`.
        self._counts: dict[int, int] = {}
        #: Where these were counted: the fit and the number of the next push.
        self._counted_at: tuple[str, int] = ("", 0)
        self._tells_of_missing = True

    def begin_fit(self, fit: int) -> None:
        self._fit, self._is_in_fit = f"in fit {fit}", True

    def end_fit(self, fit: int) -> None:
        self._fit, self._is_in_fit = f"after fit {fit}", False

    def applies(self, parts: Sequence[ShardBatch]) -> bool:
        """Return whether the data are cut into the shards of the job, and this worker has some of them."""
        shards = self._session.num_shards
        return bool(parts) and len(parts) < parts[0].dataset_shards == shards

    def share(
        self, position: LoopPosition, records: Mapping[int, NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the records of all shards, in their order, for those of this worker's by shard, each of
        shape (rows, size). Raises ServerStalled."""
        sequence = self._session.sequence if self._is_in_fit else _NEVER
        if position.test == 0:
            self._begin(sequence, position.depth)
        number = self._counts.get(position.depth, 0)
        place = f"{self._fit} {sequence} {position.depth} {number} {position.test}"
        found, shards = self._session.gather(place, sequence, records)
        if len(shards) < self._session.num_shards and self._tells_of_missing:
            self._tells_of_missing = False
            missing = sorted(set(range(self._session.num_shards)) - set(shards))
            _LOG.warning(
                "An evaluation leaves out rows of shards %s: their worker was restarted in it. Evaluate once "
                "more for the scores of all rows.",
                missing,
            )
        return found

    def _begin(self, sequence: int, depth: int) -> None:
        here = self._fit, sequence
        if here != self._counted_at:
            self._counted_at, self._counts = here, {}
        self._counts[depth] = self._counts.get(depth, 0) + 1
