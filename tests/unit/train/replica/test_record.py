"""Records of shards are combined the same in each task."""

from __future__ import annotations

import keras
import numpy as np

from insitu.train.replica.combination import Operation
from insitu.train.replica.record import EXTRA_LOGS, RecordLayout
from insitu.train.replica.state import ModelState


def test_sums_add_up_the_first_shard_with_rows_decides_and_logs_are_means_by_rows() -> None:
    seed, total = keras.Variable(np.zeros(2)), keras.Variable(0.0)
    layout = RecordLayout(ModelState((), (), (seed,), (), (total,), (), ()), training=True)
    assert layout.size == 1 + 1 + 2 + EXTRA_LOGS
    records = np.zeros((3, layout.size))
    # [rows, the sum, the seed, the first extra log]. The first shard has no rows.
    records[:, :5] = [[0, 99, 9, 9, 9], [1, 10, 5, 6, 1.0], [3, 20, 7, 8, 2.0]]
    combined = layout.combine(records)
    assert combined[:5].tolist() == [4, 30, 5, 6, 1.75]
    kept = keras.Variable(0)
    tested = RecordLayout(ModelState((), (), (seed,), (kept,), (), (), ()), training=False)
    assert [variable is seed for variable, _ in tested.firsts] == [True]  # of other state tests move none


def test_some_sums_are_averaged_and_other_state_combines_by_its_operation() -> None:
    total, count, largest = keras.Variable(0.0), keras.Variable(0.0), keras.Variable(0.0)
    steps = keras.Variable(0, dtype="int32")
    state = ModelState(
        *((), (), (), (), (total, count), (), ()),
        combined=((steps, Operation.MEAN),),
        metric_combined=((largest, Operation.LARGEST),),
    )
    layout = RecordLayout(state, training=True)
    layout.average({id(total), id(count)})
    records = np.zeros((3, layout.size))
    # [rows, total, count, steps, largest]. The first shard has no rows.
    records[:, :5] = [[0, 9, 9, 9, 9], [1, 10, 1, 3, 5], [3, 20, 1, 4, 2]]
    assert layout.combine(records)[:5].tolist() == [4, 17.5, 1, 4, 5]
    assert [v is largest for v, _ in RecordLayout(state, training=False).entries()] == [False, False, True]
