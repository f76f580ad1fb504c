"""When the replicas of a mirrored strategy are processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import pytest

import insitu
from insitu.train.devices import Device
from insitu.train.strategies import mirrored


def devices(count: int, kind: str = "cpu") -> list[Device]:
    return [Device(f"{kind}:{i}", kind, i, "torch", f"{kind}:{i}") for i in range(count)]


@pytest.mark.parametrize(
    ("backend", "chosen", "in_job", "can_start", "expected"),
    [
        ("torch", devices(2), False, True, True),
        ("torch", devices(2), False, False, False),
        ("torch", devices(2), True, True, False),
        ("torch", devices(1), False, True, False),
        ("torch", devices(2, "tpu"), False, True, False),
        ("tensorflow", devices(2), False, True, False),
        ("jax", devices(2), False, True, False),
    ],
)
def test_pytorch_has_a_process_for_each_device_of_a_script(
    monkeypatch: pytest.MonkeyPatch, backend: str, chosen: Any, in_job: bool, can_start: bool, expected: bool
) -> None:
    here = insitu.context()
    context = dataclasses.replace(here, job_id="j-1") if in_job else here
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    monkeypatch.setattr(mirrored, "read_context", lambda: context)
    monkeypatch.setattr(mirrored, "get_replica_config", lambda: None)
    monkeypatch.setattr(mirrored, "can_start_replicas", lambda: can_start)
    assert mirrored._uses_processes(chosen) is expected


def test_a_further_replica_is_one_whatever_its_command_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    monkeypatch.setattr(mirrored, "get_replica_config", lambda: object())
    monkeypatch.setattr(mirrored, "can_start_replicas", lambda: False)
    assert mirrored._uses_processes(devices(2))


def test_this_process_takes_the_device_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = mirrored.resolve_all(["cpu:0"])
    joined: list[Any] = []

    def join(chosen: Any, context: Any) -> Any:
        joined.append(chosen)
        return first, context

    monkeypatch.setattr(mirrored, "_uses_processes", lambda chosen: True)
    monkeypatch.setattr(mirrored, "join_replicas", join)
    assert insitu.MirroredStrategy(["cpu:0"]).devices == (first,)
    assert joined == [[first]]
    assert insitu.MirroredStrategy(["cpu:0"], context=insitu.context()).devices == (first,)
    assert len(joined) == 1  # a context is that of one process
