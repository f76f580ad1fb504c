"""Detect a custom loop that forgot to sum its gradients: its replicas drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.base.errors import InputError
from insitu.exchange import Group
from insitu.train.collectives import gather_sizes
from insitu.train.elastic import Fingerprint, LoopPosition, check_equal
from insitu.train.replica import to_numpy

LOOP_CHECK_INTERVAL = 100
"""Steps of a custom loop between two checks."""

_FORGOTTEN = (
    "did the loop forget to combine its gradients? In strategy.run an optimizer made in strategy.scope() "
    "sums them over replicas; elsewhere use strategy.reduce."
)


def hash_values(variables: Sequence[Any]) -> str:
    """Return a hash of the values of variables, in their order."""
    values = Fingerprint((variable.path, to_numpy(variable)) for variable in variables)
    return f"{int(values.summary[1]) & 2**64 - 1:016x}"


def check_same_place(group: Group, position: LoopPosition) -> None:
    """Raise InputError, in every task, unless all tasks are at this step of their data. Collective."""
    places = gather_sizes(group, position.epoch << 32 | position.step)
    if len(set(places)) > 1:
        found = [f"epoch {place >> 32}, step {place % 2**32} in shard {i}" for i, place in enumerate(places)]
        raise InputError(
            "All tasks of a loop iterate the same step of the same epoch. Received: "
            f"{'; '.join(found)}. Restore checkpoints, and call set_epoch and load_state_dict, in each task."
        )


def check_weights(group: Group, variables: Sequence[Any], where: str) -> None:
    """Raise Diverged, in every task, unless all tasks of `group` have the same values. Collective."""
    if group.size > 1:
        own = Fingerprint((variable.path, to_numpy(variable)) for variable in variables)
        check_equal(group, own, where, _FORGOTTEN)
