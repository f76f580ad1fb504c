"""Functions of tf.config about single devices. There is no GPU: its driver's files are played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.base.errors import InputError
from insitu.train.devices import old_config


@pytest.fixture
def on_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, and a backend that hasn't started."""
    for name in ("0000:01", "0000:02"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(old_config, "_DRIVER", tmp_path)
    monkeypatch.setattr(old_config, "active_name", lambda: "jax")
    monkeypatch.setattr(old_config, "_refuse_started", lambda what, value: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(insitu.config, "apply_device_settings", lambda: None)
    for name in ("INSITU_MEMORY_GROWTH", "INSITU_MEMORY_LIMIT"):
        monkeypatch.setenv(name, "")


def test_on_tensorflow_they_are_its_own() -> None:
    tf = pytest.importorskip("tensorflow")
    assert insitu.config.list_physical_devices("CPU") == tf.config.list_physical_devices("CPU")
    assert insitu.config.list_logical_devices("GPU") == tf.config.list_logical_devices("GPU")
    assert insitu.config.experimental.list_physical_devices() == tf.config.list_physical_devices()
    assert insitu.config.get_visible_devices("GPU") == []
    with pytest.raises(InputError, match=r"tf\.config\.set_visible_devices: .* Received: "):
        insitu.config.set_visible_devices([], "CPU")  # it has started


def test_gpus_are_chosen_by_number(on_jax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    gpus = insitu.config.list_physical_devices("GPU")
    assert [gpu.name for gpu in gpus] == ["/physical_device:GPU:0", "/physical_device:GPU:1"]
    assert [each.device_type for each in insitu.config.list_physical_devices()] == ["CPU", "GPU", "GPU"]
    with pytest.raises(InputError, match=r"sets up all GPUs alike. Received: memory growth of"):
        insitu.config.experimental.set_memory_growth(gpus[1], True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    insitu.config.set_visible_devices(gpus[1], "GPU")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    (gpu,) = insitu.config.get_visible_devices("GPU")
    insitu.config.experimental.set_memory_growth(gpu, True)
    limit = insitu.config.LogicalDeviceConfiguration(memory_limit=512)
    insitu.config.set_logical_device_configuration(gpu, [limit])
    settings = insitu.config.settings()
    assert settings.memory_growth and settings.memory_limit == 512
    with pytest.raises(InputError, match=r"which has 1\. Received: /physical_device:GPU:1"):
        insitu.config.set_visible_devices(gpus[1], "GPU")
    insitu.config.set_visible_devices([], "GPU")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    assert insitu.config.list_physical_devices("GPU") == []
    with pytest.raises(InputError, match="The CPU is always used on jax"):
        insitu.config.set_visible_devices([])


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match=r"'insitu.base.config' has no attribute 'nothing'"):
        insitu.config.nothing  # noqa: B018
