"""Devices are set up before a backend starts, by a script or by a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "startup_run.py"


def run(backend: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "KERAS_BACKEND": backend, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize("backend", ["tensorflow", "jax", pytest.param("torch", marks=pytest.mark.torch)])
def test_virtual_devices_and_the_log_of_placements(backend: str):
    done = run(backend, str(SCRIPT))
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS"))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULTS"))
    there = ", ".join(result["devices"])
    wanted = f"A device must be one of {there} on {backend}. Received: cpu:7"
    assert result["refused"][1].startswith(wanted)
    assert result["fallback"][0] == "cpu:0"
    assert "no device gpu:0" in result["fallback"][1]
    assert "[insitu] variable sequential/last/kernel: " in done.stderr
    if backend == "torch":  # its virtual devices are names, of which there may be more at any time
        assert result["devices"] == ["cpu:0", "cpu:1", "cpu:2"]
        assert "operation aten." in done.stderr
        return
    assert result["devices"] == ["cpu:0", "cpu:1"]
    assert "cpu:1" in result["placed"].lower()
    assert "must be set before" in result["refused"][0]
    assert result["kept"] == ["cpu", 2]
    # TensorFlow tells of operations, JAX of programs.
    assert ("device:CPU:0" if backend == "tensorflow" else "Compiling jit(") in done.stderr


def test_the_command_lists_devices():
    done = run("jax", "-m", "insitu", "devices", "--json", INSITU_VIRTUAL_DEVICES="cpu:2")
    found = json.loads(done.stdout)
    assert [device["name"] for device in found] == ["cpu:0", "cpu:1"]
    assert found[0] == {
        "name": "cpu:0",
        "kind": "cpu",
        "index": 0,
        "backend": "jax",
        "native": found[0]["native"],
        "model": "",
        "memory": None,
        "virtual": True,
    }


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--backend", "theano"], {}, "--backend is one of tensorflow, jax, torch"),
        (["--backend", "jax"], {"INSITU_VIRTUAL_DEVICES": "gpu:2"}, "out of a CPU only"),
        ([], {"INSITU_MEMORY_LIMIT": "much"}, "a number of MiB"),
    ],
)
def test_what_cannot_be_listed(arguments: list[str], environment: dict[str, str], message: str):
    done = run("jax", "-m", "insitu", "devices", *arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
