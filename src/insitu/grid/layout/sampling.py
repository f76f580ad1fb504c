"""Pure: rows that are drawn at random from all shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from insitu.grid.layout.order import Rows
from insitu.grid.layout.permutation import Permutation

_SAMPLE = 2
"""The purpose of the key of a permutation. Others are in `windows.py`."""


def draw_rows(counts: Sequence[int], count: int, seed: int) -> list[tuple[int, Rows, Rows]]:
    """Draw up to `count` rows without putting them back, from shards of `counts` rows.

    Return, for each shard of which there are some, (shard, their places in the sample, their numbers in the
    shard). They follow from the arguments; the first rows of a larger sample are those of a smaller one.
    """
    ends = np.cumsum([0, *counts])
    total = int(ends[-1])
    drawn = Permutation(total, seed, _SAMPLE).apply(np.arange(min(count, total)))
    found = []
    for shard in range(len(counts)):
        places = np.flatnonzero((ends[shard] <= drawn) & (drawn < ends[shard + 1]))
        if len(places):
            found.append((shard, places, drawn[places] - ends[shard]))
    return found
