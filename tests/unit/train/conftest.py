"""Fixtures of the train room's tests."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
from models import in_shards

from insitu.train import MultiWorkerMirroredStrategy


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    """203 small images of two classes: not divisible by a batch, nor by two shards."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(203, 8, 8, 1)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0).astype("int64")


@pytest.fixture
def strategy_over() -> Callable[[int], MultiWorkerMirroredStrategy]:
    """A strategy whose one process hosts all of so many shards."""

    def make(num_shards: int) -> MultiWorkerMirroredStrategy:
        return MultiWorkerMirroredStrategy(context=in_shards(tuple(range(num_shards)), num_shards))

    return make
