"""Fixtures of the extensions' tests."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
from models import image_rows, in_shards

from insitu.train import MultiWorkerMirroredStrategy


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    return image_rows()


@pytest.fixture
def strategy_over() -> Callable[[int], MultiWorkerMirroredStrategy]:
    """A strategy whose one process hosts all of so many shards."""

    def make(num_shards: int) -> MultiWorkerMirroredStrategy:
        return MultiWorkerMirroredStrategy(context=in_shards(tuple(range(num_shards)), num_shards))

    return make
