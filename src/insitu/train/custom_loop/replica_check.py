"""Detect a custom loop that forgot to sum its gradients: its replicas drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.exchange import Group
from insitu.train.elastic import Fingerprint, check_equal
from insitu.train.replica import to_numpy

LOOP_CHECK_INTERVAL = 100
"""Steps of a custom loop between two checks."""

_FORGOTTEN = (
    "did the loop forget to combine its gradients? In strategy.run an optimizer made in strategy.scope() "
    "sums them over replicas; elsewhere use strategy.reduce."
)


def check_weights(group: Group, variables: Sequence[Any], where: str) -> None:
    """Raise Diverged, in every task, unless all tasks of `group` have the same values. Collective."""
    if group.size > 1:
        own = Fingerprint((variable.path, to_numpy(variable)) for variable in variables)
        check_equal(group, own, where, _FORGOTTEN)
