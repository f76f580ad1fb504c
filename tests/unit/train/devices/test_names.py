"""Names of devices, on whichever backend Keras has here."""

from __future__ import annotations

import sys

import pytest

from insitu import config
from insitu.base.errors import InputError
from insitu.train.devices.names import list_devices, parse_name, resolve, resolve_all


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("cpu:1", ("cpu", 1)),
        ("CPU", ("cpu", 0)),
        ("gpu:3", ("gpu", 3)),
        ("/cpu:0", ("cpu", 0)),
        ("/device:GPU:1", ("gpu", 1)),
        ("/job:localhost/replica:0/task:0/device:CPU:2", ("cpu", 2)),
        ("cuda:1", ("gpu", 1)),
        ("TFRT_CPU_1", ("cpu", 1)),
        ("CudaDevice(id=1)", ("gpu", 1)),
        ("xla:2", ("tpu", 2)),
    ],
)
def test_every_backends_spelling_is_understood(text: str, parsed: tuple[str, int]):
    assert parse_name(text) == parsed


@pytest.mark.parametrize("text", ["", "cpu:", "cpu:-1", "disk:0", "cpu:one"])
def test_what_names_no_device_is_refused(text: str):
    with pytest.raises(InputError, match="KIND:INDEX"):
        parse_name(text)


def test_a_device_that_is_not_there_is_an_error_that_lists_those_that_are():
    with pytest.raises(
        InputError, match=r"one of cpu:0 on \w+\. Received: cpu:7\..*set_virtual_devices\(8\)"
    ):
        resolve("cpu:7")


def test_soft_placement_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "settings", lambda: config.DeviceSettings(soft_placement=True))
    with pytest.warns(UserWarning, match="no device gpu:5: cpu:0 is used"):
        assert resolve("gpu:5").name == "cpu:0"
    with pytest.warns(UserWarning, match="no device"):
        assert [d.name for d in resolve_all(["cpu:0", "gpu:0", "gpu:1"])] == ["cpu:0"]


def test_all_devices_of_the_best_kind_by_default():
    assert [d.name for d in resolve_all(None)] == ["cpu:0"]
    assert resolve_all(["cpu:0"]) == list_devices()


@pytest.mark.parametrize(
    ("names", "rule"), [([], "at least one"), ("cpu:0", "a list"), (["cpu:0"] * 2, "once")]
)
def test_lists_of_devices_that_make_no_sense(names: object, rule: str):
    with pytest.raises(InputError, match=rule):
        resolve_all(names)  # type: ignore[arg-type]


def test_a_device_is_a_place_to_put_things():
    import keras

    device = resolve("cpu:0")
    with device.scope():
        variable = keras.Variable([1.0, 2.0])
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert "cpu" in str(device.handle()).lower()


def test_an_unknown_backend_is_refused():
    with pytest.raises(InputError, match="A backend is one of"):
        list_devices("theano")


def test_a_backend_that_is_not_installed_is_an_error_whose_advice_works(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    # insitu isn't on a package index, so its extras can't be the advice.
    with pytest.raises(InputError, match=r"'torch' isn't installed\. Install it: pip install torch$"):
        list_devices("torch")
