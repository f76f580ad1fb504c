"""What a gap remembers of a model, on any backend. Run as a script, it prints the names of the checks."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from insitu.train.fit.gap import Gap, load_random_states
from insitu.train.replica import read_state, to_numpy


def make() -> Any:
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="second")]
    )
    model.compile(keras.optimizers.Adam(0.5, use_ema=True), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


@contextlib.contextmanager
def opened(model: Any) -> Iterator[Gap]:
    """A gap that is closed in the end, whatever happens."""
    gap = Gap(model)
    gap.open()
    try:
        yield gap
    finally:
        gap.close()


def read(model: Any) -> dict[str, Any]:
    return {name: np.array(to_numpy(v)) for name, v in read_state(model).named()}


def same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(some[n], others[n]) for n in some)


def swap(model: Any) -> None:
    callback = keras.callbacks.SwapEMAWeights()
    callback.set_model(model)
    callback.on_test_begin()


def set_weights(model: Any) -> None:
    model.set_weights([w + 1 for w in model.get_weights()])


def learning_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.25


def assign(model: Any) -> None:
    kernel, bias, *_ = model.weights
    kernel.assign(kernel * 3)
    bias.assign_add(np.ones(bias.shape))
    bias.assign_sub(np.full(bias.shape, 3))


def count_step(model: Any) -> None:
    model.optimizer.iterations.assign_add(1)


CHANGES: dict[str, Callable[[Any], None]] = {
    "assign": assign,
    "set_weights": set_weights,
    "learning rate": learning_rate,
    "iterations": count_step,
    "swap": swap,
}


def check_change(change: Callable[[Any], None]) -> None:
    """What was assigned, as often as that was, is told as it was; and it can be undone."""
    model = make()
    for variable in model.optimizer._model_variables_moving_average:
        variable.assign(np.full(variable.shape, 2))
    before = read(model)
    with opened(model) as gap:
        change(model)
        changed = read(model)
        assert not same(changed, before)
        assert same(gap.views(read_state(model)), before)
        change(model)
        gap.open()
        assert same(gap.views(read_state(model)), before)
        gap.close()
        assert same(gap.views(read_state(model)), read(model))
    for variable, value in zip(read_state(model).named(), before.values(), strict=True):
        variable[1].assign(value)
    gap = Gap(model)
    with gap.reverting():
        change(model)
        assert same(read(model), changed)
    assert same(read(model), before) and not gap.is_open


def check_pause() -> None:
    """A unit that is done again has no part in what it began with."""
    model = make()
    before = read(model)
    with opened(model) as gap:
        model.weights[0].assign_add(np.ones(model.weights[0].shape))
        gap.pause()
        set_weights(model)
        found = gap.views(read_state(model))
        assert np.array_equal(found["trainable/0"], before["trainable/0"])
        assert np.array_equal(found["trainable/1"], to_numpy(model.weights[1]))
        gap.rebase()
        assert same(gap.views(read_state(model)), read(model))


def check_traced() -> None:
    """A function that is only traced changes nothing; nor does a scope without state."""
    model = make()
    kernel = model.weights[0]
    with opened(model) as gap:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            @tf.function
            def change() -> None:
                kernel.assign(kernel * 2)

            change.get_concrete_function()
        else:
            with keras.StatelessScope():
                kernel.assign(kernel * 2)
        assert not gap._values
        kernel.assign(kernel * 2)
        assert len(gap._values) == 1


def check_two_gaps() -> None:
    """A callback may train another model."""
    model, other = make(), make()
    first, second = read(model), read(other)
    with opened(model) as outer:
        set_weights(model)
        with opened(other) as inner:
            set_weights(other)
            assert same(inner.views(read_state(other)), second)
        set_weights(other)
        assert same(outer.views(read_state(model)), first)
        assert same(outer.views(read_state(other)), second)


def check_stop_training() -> None:
    model = make()
    model.stop_training = False
    with opened(model) as gap:
        model.stop_training = True
        assert not gap.stop_training
        gap.close()
        assert gap.stop_training
        with gap.reverting():
            model.stop_training = False
        assert model.stop_training


def check_random() -> None:
    def draw() -> tuple[float, float]:
        return random.random(), float(np.random.random())

    model = make()
    gap = Gap(model)
    try:
        gap.open(with_random=False)
        before = draw()
        gap.open()
        states = gap.random_states
        first, second = draw(), draw()
        gap.open()
        load_random_states(gap.random_states)
        assert (draw(), draw()) == (first, second) != (before, first)
        load_random_states(states)
        assert draw() == first
        gap.close()
        load_random_states(gap.random_states)
        assert draw() == second
    finally:
        gap.close()


CHECKS: dict[str, Callable[[], None]] = {
    **{name: lambda change=change: check_change(change) for name, change in CHANGES.items()},
    "pause": check_pause,
    "traced": check_traced,
    "two gaps": check_two_gaps,
    "stop_training": check_stop_training,
    "random": check_random,
}


if __name__ == "__main__":
    for check in CHECKS.values():
        check()
    print("RESULTS" + json.dumps([keras.backend.backend(), *CHECKS]))
