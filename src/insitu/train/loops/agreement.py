"""Finds a custom loop that forgot to sum its gradients: replicas that drift apart."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from insitu.errors import Diverged
from insitu.exchange import Group
from insitu.train.state import to_numpy

CHECK_EVERY = 100
"""Steps of a custom loop between two checks."""


def check_weights(group: Group, variables: Sequence[Any], where: str) -> None:
    """Raises Diverged, in every task, unless all tasks of `group` have the same values. Collective."""
    if group.size == 1:
        return
    own = np.array(
        [zlib.crc32(np.ascontiguousarray(to_numpy(v)).data.cast("B")) for v in variables], np.int64
    )
    summary = np.array([len(own), zlib.crc32(own.tobytes())], np.int64)
    summaries = _of_all(group, summary)
    if (summaries == summaries[0]).all():
        return
    differing = "their number of variables"
    if (summaries[:, 0] == summaries[0, 0]).all():
        sums = _of_all(group, own)
        first = int(np.flatnonzero((sums != sums[0]).any(axis=0))[0])
        differing = (
            f"{variables[first].path} (checksums {', '.join(f'{int(s):08x}' for s in sums[:, first])})"
        )
    others = [r for r in range(1, group.size) if (summaries[r] != summaries[0]).any()]
    raise Diverged(
        f"Replicas differ {where}: {', '.join(map(group.task, others))} from {group.task(0)}, first in "
        f"{differing}. Did the loop forget to combine its gradients? In strategy.run an optimizer made in "
        "strategy.scope() sums them over replicas; elsewhere use strategy.reduce."
    )


def _of_all(group: Group, row: np.ndarray) -> np.ndarray:
    rows = np.zeros((group.size, row.size), np.int64)
    for rank in range(group.size):
        rows[rank] = group.broadcast(row.copy(), rank)
    return rows
