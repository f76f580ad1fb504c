"""Has all tasks of a training do what one of them wants, at the same step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.exchange import Group
from insitu.train.collectives import squeeze_shards
from insitu.train.elastic import CALL
from insitu.train.fit import KerasTrainer
from insitu.train.strategies import ParameterServerStrategy


def agree(trainer: KerasTrainer, wanted: bool) -> bool:
    """Return, in each task, whether one of them wants something. Collective, in the middle of a fit. On
    parameter servers each task does what it wants itself."""
    membership = trainer.membership
    if isinstance(trainer.strategy, ParameterServerStrategy):
        return wanted  # workers on servers don't wait for each other
    if len(membership.context.workers) <= 1:
        return wanted

    def ask() -> bool:
        def work(group: Group) -> NDArray[Any]:
            return squeeze_shards(np.full((len(group.shards), 1), float(wanted)))

        rows = membership.lockstep.run_unit_until_done(trainer.calls.position(CALL), work)
        # No rows: this task takes another's place, and the others have passed here.
        return bool(rows.any())

    return bool(membership.run_call(trainer, ask))
