"""Summaries in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.summary.summary_iterator import summary_iterator

import insitu


@pytest.mark.parametrize("recording", [True, False])
def test_one_replica_of_a_process_writes(strategy_over: Any, tmp_path: Path, recording: bool) -> None:
    strategy = strategy_over(3)

    def step(x: Any) -> Any:
        tf.summary.write("loss", tf.reduce_sum(x), step=7)
        return x

    with tf.summary.create_file_writer(str(tmp_path)).as_default(), tf.summary.record_if(recording):
        for batch in strategy.distribute_dataset(tf.data.Dataset.range(6).batch(3)):
            strategy.run(step, (batch,))
        tf.summary.flush()
    (path,) = tmp_path.iterdir()
    found = [value for event in summary_iterator(str(path)) for value in event.summary.value]
    assert [int(tf.make_ndarray(value.tensor)) for value in found] == ([0, 3] if recording else [])


def test_a_replica_alone_writes_as_everywhere(tmp_path: Path) -> None:
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        insitu.OneDeviceStrategy().run(
            lambda x: tf.summary.write("loss", tf.reduce_sum(x), step=1), (np.ones(2),)
        )
        tf.summary.flush()
    (path,) = tmp_path.iterdir()
    assert sum(len(event.summary.value) for event in summary_iterator(str(path))) == 1
