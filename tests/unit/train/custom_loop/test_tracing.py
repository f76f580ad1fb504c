"""A step is run without effect, and what it touches is recorded."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from insitu.base.errors import TrainingError
from insitu.train.custom_loop.tracing import DeferredUpdates, VariableTracer, defer_apply


def test_reads_writes_and_seeds_are_recorded_and_nothing_is_assigned() -> None:
    read, written = keras.Variable(1.0, name="read"), keras.Variable(2.0, name="written")
    seeds = keras.random.SeedGenerator(5)
    before = seeds.state.numpy().tolist()
    tracer = VariableTracer(DeferredUpdates())
    with tracer.track():
        written.assign(read + 1)
        seeds.next()
    assert tracer.read[0] is read and any(v is written for v in tracer.written)
    assert tracer.seed_generators == [seeds]
    assert float(written.numpy()) == 2.0 and seeds.state.numpy().tolist() == before
    with tracer.track(), pytest.raises(TrainingError, match="can't make variables"):
        keras.Variable(3.0)
    assert float(keras.Variable(3.0).numpy()) == 3.0


def test_updates_are_deferred_and_their_variables_not_read_afterwards() -> None:
    variable = keras.Variable(np.zeros(2, "float32"), name="w")
    mine, other = keras.optimizers.SGD(), keras.optimizers.SGD()
    mine.build([variable])
    deferred = DeferredUpdates()
    with defer_apply([mine], deferred), VariableTracer(deferred).track():
        mine.apply([np.ones(2, "float32")], [variable])
        with pytest.raises(TrainingError, match="can't read them after"):
            _ = variable + 1
        with pytest.raises(TrainingError, match="apply\\(\\) once"):
            mine.apply([np.ones(2, "float32")], [variable])
        with pytest.raises(TrainingError, match="made outside"):
            other.apply([np.ones(2, "float32")], [variable])
    assert deferred.variables == [variable] and len(deferred.gradients) == 1
    assert variable.numpy().tolist() == [0, 0] and "apply" not in vars(mine)
