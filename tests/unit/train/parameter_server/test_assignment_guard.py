"""Only what all workers get may be assigned in a scheduled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from insitu.base.errors import TrainingError
from insitu.train.parameter_server.coordinator import AssignmentGuard


def test_assignments_are_refused_unless_they_are_allowed_or_the_guard_is_lifted() -> None:
    count, other, raw = keras.Variable(0.0), keras.Variable(0.0, name="other"), tf.Variable(0.0)
    seed = keras.random.SeedGenerator(1)
    guard = AssignmentGuard(lambda: [count])
    with guard.refusing():
        count.assign_add(1.0)
        keras.random.normal((1,), seed=seed)
        with pytest.raises(TrainingError, match=r"an assignment to 'other'\. Move it"):
            other.assign(1.0)
        with guard.lifted():
            other.assign(2.0)
            raw.assign(2.0)
        with pytest.raises(TrainingError, match=r"the tf\.Variable"):
            raw.assign_add(1.0)
    raw.assign_add(1.0)
    other.assign_add(1.0)
    assert [float(v) for v in (count.value, other.value, raw)] == [1.0, 3.0, 3.0]


@pytest.mark.parametrize("step", [lambda v: v.assign(1.0), tf.function(lambda v: v.assign_sub(1.0))])
def test_a_compiled_function_is_refused_as_it_is_traced(step: Callable[[Any], Any]) -> None:
    raw = tf.Variable(0.0)
    with pytest.raises(TrainingError, match="assignment to the"), AssignmentGuard(list).refusing():
        step(raw)
    assert float(raw) == 0.0
