"""`insitu devices`: what a process of the backend answered, or why it didn't."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.base.errors import InputError, TrainingError
from insitu.cli import devices

CPU = {
    "name": "cpu:0",
    "backend": "jax",
    "native": "TFRT_CPU_0",
    "model": "",
    "memory": None,
    "virtual": False,
}
GPU = {**CPU, "name": "gpu:1", "model": "H200", "memory": 150 << 29, "virtual": True}


def answers(monkeypatch: pytest.MonkeyPatch, *lines: Any, code: int = 0, errors: str = "") -> list[list[str]]:
    """Let the backend's process print `lines`. Returns the commands that are run."""
    commands = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=code, stdout="\n".join(lines), stderr=errors)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_answer_is_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answers(monkeypatch, "WARNING: a backend prints much", json.dumps([CPU]))
    assert devices.ask("jax") == [CPU]
    assert [command[1:] for command in commands] == [["-m", "insitu.train.devices", "jax"]]


def test_a_backend_of_another_name_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answers(monkeypatch)
    with pytest.raises(InputError, match=r"--backend is one of .*jax.*Received: 'mxnet'"):
        devices.ask("mxnet")
    assert commands == []


def test_a_backend_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, json.dumps({"error": "torch isn't installed"}))
    with pytest.raises(InputError, match="torch isn't installed"):
        devices.ask("torch")


@pytest.mark.parametrize(
    ("errors", "named"), [("Traceback\nValueError: no driver\n", "ValueError: no driver"), ("", "no message")]
)
def test_a_backend_that_does_not_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch, errors: str, named: str
) -> None:
    answers(monkeypatch, code=1, errors=errors)
    with pytest.raises(TrainingError, match=f"jax does not start: {named}"):
        devices.ask("jax")


def test_a_backend_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(TrainingError, match="jax did not start within 120 s"):
        devices.ask("jax")


def test_devices_are_printed_as_a_table_or_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, json.dumps([CPU, GPU]))
    devices.devices("jax")
    header, cpu, gpu = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "DEVICE"
    assert cpu.split() == ["cpu:0", "jax", "TFRT_CPU_0", "-", "-"]
    assert gpu.split() == ["gpu:1", "(virtual)", "jax", "TFRT_CPU_0", "H200", "75.0", "GiB"]
    devices.devices("jax", as_json=True)
    assert json.loads(capsys.readouterr().out) == [CPU, GPU]
