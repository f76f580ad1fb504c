"""Replicas that must be equal and aren't are named, with where they differ."""

from __future__ import annotations

import numpy as np
import pytest
from exchange_ranks import in_threads

import insitu.exchange
from insitu.base.errors import Diverged
from insitu.train.elastic.divergence import Fingerprint, check_equal


def test_replicas_that_differ_are_named_on_both_sides() -> None:
    def compare(rank: int, addresses: list[str]) -> str:
        with insitu.exchange.join(rank, addresses, tasks=["worker:0", "worker:1", "worker:2"]) as group:
            same = [("trainable/0", np.ones(5)), ("optimizer/0", np.zeros(2, np.float32))]
            check_equal(group, Fingerprint(same, (1, 2)), "at epoch 1")
            group.barrier()
            drifted = [("trainable/0", np.ones(5)), ("optimizer/0", np.full(2, rank // 2, np.float32))]
            with pytest.raises(Diverged, match="worker:2 from worker:0 in 1 of 3 values") as raised:
                check_equal(group, Fingerprint(drifted, (1, 2)), "at epoch 1")
            assert "The first is optimizer/0: worker:0 has" in str(raised.value)
            with pytest.raises(Diverged, match="position"):
                check_equal(group, Fingerprint(same, (1, rank)), "at epoch 1")
            return "raised"

    assert in_threads(3, compare) == ["raised"] * 3
