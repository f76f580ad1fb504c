"""The replicas of a custom loop come from the module of the active backend."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from insitu.train.custom_loop import factory

MODEL: Any = object()


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_each_backend_has_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    module = SimpleNamespace(
        trace_step=lambda *given: calls.append(("trace", *given)),
        LoopReplica=lambda *given: ("replica", *given),
        LoopDeviceReplicas=lambda *given: ("devices", *given),
    )
    calls: list[Any] = []
    names: list[str] = []
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    monkeypatch.setattr(importlib, "import_module", lambda name: names.append(name) or module)
    factory.trace_step(MODEL, [1])
    assert calls == [("trace", MODEL, [1])]
    assert factory.make_loop_replica(MODEL, [1]) == ("replica", MODEL, [1])
    made = factory.make_multi_device_loop_replica(MODEL, [1], ["d"], (0,), None)
    assert made == ("devices", MODEL, [1], ["d"], (0,), None)
    assert names == [f"insitu.train.backends.{backend}.loop"] * 3
