"""On TensorFlow a user's step becomes a graph, and its outputs come behind the replica's own results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from insitu.train.backends.tensorflow import loop
from insitu.train.replica import ShardBatch


def test_a_step_is_traced_in_a_graph_for_any_number_of_rows() -> None:
    import tensorflow as tf

    seen: list[Any] = []

    def trace(arrays: Any, outside: Any) -> list[Any]:
        seen.extend((tf.inside_function(), array.shape.as_list(), array.dtype.name) for array in arrays)
        return list(arrays)

    model: Any = SimpleNamespace(trace=trace, metrics_variables=[], outputs=[])
    loop.trace_step(model, [np.ones(1, "float32"), np.ones((1, 4), "int64")])
    assert seen == [(True, [None], "float32"), (True, [None, 4], "int64")]


def test_outputs_of_the_step_are_kept_by_shard() -> None:
    replica: Any = object.__new__(loop.LoopReplica)
    replica.outputs, replica._shard, replica._all_buckets = {}, 3, ["one bucket"]
    replica._compiled = lambda *tensors: ("record", "floats", *tensors)
    assert replica._keep_outputs("loss", "metric") == ["record", "floats"]
    assert replica.outputs == {3: ["loss", "metric"]}


def test_parts_without_rows_have_no_outputs() -> None:
    replicas: Any = object.__new__(loop.LoopDeviceReplicas)
    replicas.outputs = {}
    parts = [ShardBatch(0, 0, None), ShardBatch(1, 2, "rows")]
    replicas._keep(parts, [["padding"], ["loss"]])
    assert replicas.outputs == {1: ["loss"]}
    assert replicas._make_padding(parts) == "rows"
