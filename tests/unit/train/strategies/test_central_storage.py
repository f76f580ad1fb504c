"""Where central storage puts variables and replicas."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.train import CentralStorageStrategy


def test_variables_lie_on_the_parameter_device() -> None:
    strategy = CentralStorageStrategy(["cpu:0"], "/device:CPU:0")
    assert strategy.parameter_device.name == "cpu:0"
    assert [device.name for device in strategy.devices] == ["cpu:0"]
    assert strategy.num_replicas_in_sync == 1


def test_devices_that_are_not_there_are_named() -> None:
    with pytest.raises(InputError, match="Received: cpu:9"):
        CentralStorageStrategy(["cpu:0"], "cpu:9")
    with pytest.raises(InputError, match="Received: cpu:9"):
        CentralStorageStrategy(["cpu:9"])
