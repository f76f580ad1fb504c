"""On JAX a user's step is traced by shapes alone, and its outputs are kept by shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def test_a_step_is_traced_without_being_computed() -> None:
    import jax

    from insitu.train.backends.jax.loop import trace_step

    seen: list[Any] = []

    def trace(arrays: Any, outside: Any) -> Any:
        seen.extend((isinstance(array, jax.core.Tracer), array.shape, array.dtype.name) for array in arrays)
        return arrays

    model: Any = SimpleNamespace(trace=trace, metrics_variables=[], outputs=[])
    trace_step(model, [np.ones(1, "float32"), np.ones((1, 4), "int32")])
    assert seen == [(True, (1,), "float32"), (True, (1, 4), "int32")]


def test_outputs_of_the_step_are_kept_by_the_shard_that_was_begun_last() -> None:
    from insitu.train.backends.jax.loop import LoopReplica

    replica: Any = object.__new__(LoopReplica)
    replica.outputs, replica._compiled = {}, lambda *given: (("results", *given), ["loss"])
    replica._shard = 2
    assert replica._keep_outputs("state", 1) == ("results", "state", 1)
    assert replica.outputs == {2: ["loss"]}
