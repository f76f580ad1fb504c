"""Replicas that drift apart are found."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from insitu.base.errors import Diverged
from insitu.train.custom_loop.replica_check import check_weights


class TwoReplicas:
    """A group of two whose other member has other weights."""

    size = 2

    def __init__(self, other: float) -> None:
        self._other = other
        self.told: list[np.ndarray] = []

    def task(self, rank: int) -> str:
        return f"worker:{rank}"

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """The other has as many variables, and other checksums."""
        if root:
            array[-1] += np.int64(self._other)
        return array


def test_replicas_that_drift_apart_are_named():
    variables = [keras.Variable(np.ones(3, "float32"), name="kernel")]
    check_weights(TwoReplicas(0), variables, "after step 3")  # type: ignore[arg-type]
    with pytest.raises(Diverged, match=r"after step 3: worker:1 from worker:0.*forget to combine"):
        check_weights(TwoReplicas(1), variables, "after step 3")  # type: ignore[arg-type]
