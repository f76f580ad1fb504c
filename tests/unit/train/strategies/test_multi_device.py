"""Several devices of one process, on each backend: virtual ones, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backend_checks import RUNS, result_of

import insitu
from insitu.base.errors import InputError

pytestmark = pytest.mark.timeout(450)


def differences(backend: str, folder: Path, *arguments: str) -> dict[str, float]:
    environment = {"KERAS_BACKEND": backend, "INSITU_HOME": str(folder / "home")}
    process = subprocess.Popen(
        [sys.executable, str(RUNS.with_name("device_runs.py")), str(folder), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    results: dict[str, Any] = result_of(process)
    return results


ROUNDING = 1e-6
"""TensorFlow optimises a graph of all devices in its own way, which changes a last bit here and there."""


def above(limit: float, results: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in results.items() if value > limit}


@pytest.mark.long
def test_tensorflow(tmp_path: Path):
    results = differences("tensorflow", tmp_path)
    assert len(results) == 7
    assert not above(ROUNDING, results)


@pytest.mark.slow
def test_everything_on_tensorflow(tmp_path: Path):
    results = differences("tensorflow", tmp_path, "all")
    # XLA and eager operations round in their own way.
    loose = {name: results.pop(name) for name in ("jit", "eager")}
    assert len(results) == 13
    assert not above(ROUNDING, results)
    assert not above(1e-5, loose)


@pytest.mark.slow
def test_jax(tmp_path: Path):
    results = differences("jax", tmp_path)
    assert results["central"] == results["central by hand"] == 0.0
    assert results["devices missed"] == results["devices missed (central)"] == 0
    assert results["mirrored by hand"] < 1e-5
    # One program for the global batch: BatchNorm and Dropout see all of its rows, as on one device.
    assert results["mirrored"] < 1e-5


@pytest.mark.torch
def test_torch(tmp_path: Path):
    results = differences("torch", tmp_path, "all")
    assert len(results) == 8
    assert not above(0.0, results)


def test_a_device_that_is_not_there_is_named():
    for make in (insitu.MirroredStrategy, insitu.CentralStorageStrategy):
        with pytest.raises(InputError, match="one of cpu:0"):
            make(["cpu:0", "gpu:7"])
