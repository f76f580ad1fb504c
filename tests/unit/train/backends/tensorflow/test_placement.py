"""On TensorFlow the name of an operation tells its device, also that of a gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from insitu.train.backends.tensorflow import several_devices as placement
from insitu.train.devices import Device

CPU = Device("cpu:0", "cpu", 0, "tensorflow", "/device:CPU:0")
OTHER = Device("cpu:7", "cpu", 7, "tensorflow", "/device:CPU:7")


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_devices", [])


def device_in_graph(build: Any) -> list[str]:
    """The devices of the operations that `build` makes in a function, which is not run."""
    import tensorflow as tf

    def build_only() -> None:
        build()

    function = tf.function(tf.autograph.experimental.do_not_convert(build_only))
    return [operation.device for operation in function.get_concrete_function().graph.get_operations()]


def test_a_placed_layer_computes_on_its_device() -> None:
    import tensorflow as tf

    layer = SimpleNamespace(call=lambda x: tf.constant(x))
    placement.TensorFlowDeviceMover().wrap(layer, OTHER)
    assert device_in_graph(lambda: layer.call(1.0)) == ["/device:CPU:7"]


def test_an_operation_named_after_a_layers_scope_goes_where_the_layer_is() -> None:
    import tensorflow as tf

    mover = placement.TensorFlowDeviceMover()
    for device in (CPU, OTHER, CPU):
        mover.wrap(SimpleNamespace(call=lambda: None), device)
    assert placement._devices == [CPU.native, OTHER.native]

    def gradients() -> None:
        for scope in ("gradients/insitu_on_1_", "insitu_on_0_2/insitu_on_1__4", "gradients", "insitu_on_0_"):
            with tf.name_scope(scope):
                tf.constant(1.0)

    class Model:
        train_step = staticmethod(gradients)

    model = Model()
    mover.prepare(model, [], {})
    assert device_in_graph(model.train_step) == [OTHER.native, OTHER.native, "", CPU.native]
    assert not hasattr(model, "test_step")


def test_a_step_that_runs_eagerly_is_left_alone() -> None:
    placement._devices.append(OTHER.native)
    model = SimpleNamespace(train_step=lambda: "ran", test_step=None)
    del model.test_step
    placement.TensorFlowDeviceMover().prepare(model, [], {})
    assert model.train_step() == "ran"


def test_a_variable_is_where_it_is() -> None:
    mover = placement.TensorFlowDeviceMover()
    variable = SimpleNamespace(value=SimpleNamespace(device="/job:localhost/replica:0/task:0/device:CPU:0"))
    assert mover.is_on(variable, CPU) and not mover.is_on(variable, OTHER)
    assert not mover.move(variable, OTHER)  # TensorFlow moves no variable
