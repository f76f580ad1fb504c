"""Records are combined in a graph as outside of it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from insitu.train.backends.tensorflow.several_devices import TensorFlowMultiDeviceReplica
from insitu.train.replica import ModelState, Operation, RecordLayout


@pytest.mark.parametrize("rows", [(2, 3), (0, 4), (5, 0), (1, 0, 2)])
def test_a_graph_combines_as_each_task_does(rows: tuple[int, ...]) -> None:
    total, count, kept = (keras.Variable(np.zeros(3, "float32")) for _ in range(3))
    others = [keras.Variable(np.zeros(2, "float32")) for _ in Operation]
    steps = keras.Variable(np.zeros(2, "int32"))
    state = ModelState(
        *((), (), (), (kept,), (total, count), (), ()),
        combined=((steps, Operation.MEAN),),
        metric_combined=tuple(zip(others, Operation, strict=True)),
    )
    layout = RecordLayout(state, training=True)
    records = np.random.default_rng(0).normal(size=(len(rows), layout.size))
    records[:, 0] = rows
    for averaged in ((), (id(count),)):
        layout.average(averaged)
        combined = TensorFlowMultiDeviceReplica._combine(
            layout, [tf.constant(r) for r in records], tf.constant(rows, tf.float64)
        )
        np.testing.assert_allclose(np.asarray(combined), layout.combine(records), rtol=1e-12)
