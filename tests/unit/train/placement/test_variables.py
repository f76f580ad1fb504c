"""Variables are made on the devices of their layers."""

from __future__ import annotations

import keras

from insitu.train.devices.names import Device, default_device
from insitu.train.placement.variables import find_device, place_new_variables


def test_the_innermost_placed_layer_decides() -> None:
    outer, inner = (Device(f"cpu:{i}", "cpu", i, "tensorflow", "") for i in range(2))
    placements = {"block": outer, "dense": inner}
    assert find_device("model/block/dense/kernel", placements) is inner
    assert find_device("model/block/other/kernel", placements) is outer
    assert find_device("model/other/kernel", placements) is None


def test_a_devices_scope_is_open_while_a_weight_is_made() -> None:
    opened = []

    class Watched:
        def scope(self):
            opened.append("scope")
            return default_device().scope()

    before = keras.layers.Layer.add_weight
    with place_new_variables({"dense": Watched()}):  # type: ignore[dict-item]
        keras.layers.Dense(1, name="dense").build((None, 2))
        keras.layers.Dense(1, name="other").build((None, 2))
    assert opened == ["scope", "scope"]  # kernel and bias
    assert keras.layers.Layer.add_weight is before
