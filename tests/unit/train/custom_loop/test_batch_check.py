"""The tasks of a custom loop compare what they have read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from insitu.errors import InputError
from insitu.train.custom_loop import check_batch
from insitu.train.replica import ShardBatch, StepBatch


class GroupOf:
    """A group whose other task has another batch."""

    shards = (0,)

    def __init__(self, other: int) -> None:
        self._other = other

    def all_gather(self, own: Any) -> Any:
        return np.array([[own.item()], [self._other]])


def step(fingerprint: int) -> StepBatch:
    return StepBatch(0, (ShardBatch(0, 3, [], (), fingerprint),))


def test_equal_batches_and_equal_ends_are_fine() -> None:
    check_batch(GroupOf(5), step(5), 0)
    check_batch(GroupOf(-1), None, 3)


def test_what_differs_is_named() -> None:
    with pytest.raises(InputError, match=r"step 2 of the loop.*shard 1"):
        check_batch(GroupOf(7), step(5), 2)
    with pytest.raises(InputError, match=r"2 steps by the processes of shards 0, more by the others"):
        check_batch(GroupOf(7), None, 2)
    with pytest.raises(InputError, match=r"2 steps by the processes of shards 1"):
        check_batch(GroupOf(-1), step(5), 2)
