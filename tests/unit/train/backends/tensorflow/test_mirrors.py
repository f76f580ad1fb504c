"""Copies of variables on further devices, here on the only one."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from insitu.train.backends.tensorflow.several_devices import MirroredVariables


def test_what_is_assigned_outside_of_steps_reaches_the_copies_by_a_refresh() -> None:
    variable = keras.Variable(np.zeros(2, "float32"))
    own = variable._value
    mirrored = MirroredVariables([variable], ["CPU:0", "CPU:0"])
    assert not mirrored.stale
    variable.assign([1.0, 2.0])
    assert mirrored.stale
    with mirrored.swapped_in(1):
        assert variable._value is not own and variable.numpy().tolist() == [0, 0]
    assert variable._value is own
    mirrored.refresh()
    with mirrored.swapped_in(1):
        assert variable.numpy().tolist() == [1, 2]
    # Who comes later shares the copy, and doesn't know what was assigned before.
    assert MirroredVariables([variable], ["CPU:0", "CPU:0"]).stale


def test_a_restored_checkpoint_reaches_the_copies(tmp_path) -> None:
    saved = keras.Variable(np.array([1.0, 2.0], "float32"))
    path = tf.train.Checkpoint(variable=saved).save(str(tmp_path / "checkpoint"))
    variable = keras.Variable(np.zeros(2, "float32"))
    mirrored = MirroredVariables([variable], ["CPU:0", "CPU:0"])
    tf.train.Checkpoint(variable=variable).restore(path)
    assert mirrored.stale and variable.numpy().tolist() == [1, 2]
    mirrored.refresh()
    with mirrored.swapped_in(1):
        assert variable.numpy().tolist() == [1, 2]
