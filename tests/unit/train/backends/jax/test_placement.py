"""On JAX an array that leaves a placed layer is free to be moved, and gradients go the same way back."""

from __future__ import annotations

import numpy as np


def test_an_uncommitted_array_is_the_same_memory() -> None:
    import jax

    from insitu.train.backends.jax.several_devices import uncommit

    device = jax.devices("cpu")[0]
    held = jax.device_put(np.arange(3.0), device)
    free = uncommit(held)
    assert held.committed and not free.committed
    assert free.unsafe_buffer_pointer() == held.unsafe_buffer_pointer()


def test_a_traced_value_is_left_as_it_is() -> None:
    import jax

    from insitu.train.backends.jax.several_devices import uncommit

    traced = []

    def function(value):
        traced.append(uncommit(value) is value)
        return value

    jax.jit(function)(1.0)
    assert traced == [True]


def test_values_and_gradients_are_moved_there_and_back() -> None:
    import jax

    from insitu.train.backends.jax.several_devices import _to_device, _to_home

    device = jax.devices("cpu")[0]

    def through(value):
        return (_to_home(_to_device(value, device, device) * 3.0, device, device) ** 2).sum()

    value, gradient = jax.value_and_grad(through)(jax.numpy.array([1.0, 2.0]))
    assert float(value) == 45.0 and gradient.tolist() == [18.0, 36.0]
    assert not gradient.committed


def test_integers_are_moved_without_a_gradient() -> None:
    import jax

    from insitu.train.backends.jax.several_devices import _to_device, _to_home

    device = jax.devices("cpu")[0]
    there = _to_device(jax.numpy.arange(3), device, None)
    assert there.committed and not _to_home(there, device, device).committed


def test_an_optimizer_computes_where_the_variable_is() -> None:
    import jax

    from insitu.train.backends.jax.several_devices import JaxDeviceMover
    from insitu.train.devices import Device

    seen = []

    class Optimizer:
        def update_step(self, gradient, variable):
            seen.append(jax.config.jax_default_device)

    class Variable:
        def __init__(self, path: str) -> None:
            self.path = path

    optimizer = Optimizer()
    placements = {"dense": Device("cpu:0", "cpu", 0, "jax", "")}
    for _ in range(2):  # a second time changes nothing
        JaxDeviceMover().prepare(None, [optimizer], placements)
    optimizer.update_step(None, Variable("dense/kernel"))
    optimizer.update_step(None, Variable("other/kernel"))
    assert seen == [jax.devices("cpu")[0], None]
