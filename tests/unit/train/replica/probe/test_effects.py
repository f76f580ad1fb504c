"""Attributes in which a user's layer keeps something of made-up rows are named."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from models import in_shards

from insitu.train import MultiWorkerMirroredStrategy


class Counter(keras.layers.Layer):
    def __init__(self, *, counts: bool) -> None:
        super().__init__(name="counter")
        self.counts, self.steps_seen, self.seen = counts, 0, []

    def call(self, x: Any) -> Any:
        if self.counts:
            self.steps_seen += 1
            self.seen.append(x.shape[0])
        return x


@pytest.mark.parametrize("counts", [True, False])
def test_a_layer_that_counts_in_python_is_named(counts: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with MultiWorkerMirroredStrategy(context=in_shards((0, 1), 2)).scope():
        model = keras.Sequential([keras.Input((2,)), Counter(counts=counts), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    said = capsys.readouterr().err
    assert ("[insitu] counter.seen, counter.steps_seen of " in said) == counts
    assert ("made-up" in said) == counts
