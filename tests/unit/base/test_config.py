"""Settings of devices: they live in the environment, and are refused where they make no sense."""

from __future__ import annotations

import pytest

from insitu import config
from insitu.base.errors import InputError


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch):
    reached = []
    monkeypatch.setattr(config, "apply_device_settings", lambda: reached.append(config.settings()))
    for name in config._NAMES.values():
        monkeypatch.delenv(name, raising=False)
    return reached


def test_nothing_is_asked_for_by_default():
    assert config.settings() == config.DeviceSettings()
    assert config.settings().to_environment() == {}


def test_what_is_set_is_in_the_environment_for_child_processes(own_environment):
    config.set_virtual_devices(4)
    config.set_memory_growth()
    config.set_memory_limit(512)
    config.set_soft_placement()
    config.set_log_placement(False)
    config.set_threads(2, 1)
    expected = config.DeviceSettings(("cpu", 4), True, 512, True, False, (2, 1))
    assert config.settings() == config.read_settings(expected.to_environment()) == expected
    assert own_environment[-1] == expected


def test_a_setting_that_a_backend_refuses_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    def refuse():
        raise InputError("too late")

    config.set_virtual_devices(2)
    monkeypatch.setattr(config, "apply_device_settings", refuse)
    with pytest.raises(InputError, match="too late"):
        config.set_virtual_devices(3)
    assert config.settings().virtual_devices == ("cpu", 2)


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("INSITU_VIRTUAL_DEVICES", "tpu:2", "cpu:N or gpu:N"),
        ("INSITU_VIRTUAL_DEVICES", "cpu:0", r"\[1, 1024\]"),
        ("INSITU_MEMORY_GROWTH", "yes", "must be 0 or 1"),
        ("INSITU_MEMORY_LIMIT", "1 GB", "a number of MiB"),
        ("INSITU_MEMORY_LIMIT", "0", "at least 1"),
        ("INSITU_BACKEND_THREADS", "0", "at least 1"),
        ("INSITU_BACKEND_THREADS", "many", "one or two numbers"),
    ],
)
def test_bad_values_say_the_rule(variable: str, value: str, rule: str):
    with pytest.raises(InputError, match=rule):
        config.read_settings({variable: value})


def test_a_number_alone_means_cpus():
    assert config.parse_virtual_devices("3") == ("cpu", 3)
    assert config.parse_virtual_devices(" GPU:2 ") == ("gpu", 2)
