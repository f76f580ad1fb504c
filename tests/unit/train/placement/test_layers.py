"""Layers on devices: the same as on one, with each variable where its layer was put."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_checks import DEADLINE, RUNS, result_of, start


@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("tensorflow", ()),
        ("jax", ("short",)),
        pytest.param("jax", (), marks=pytest.mark.slow),
        pytest.param("torch", (), marks=pytest.mark.torch),
    ],
)
@pytest.mark.long
def test_layers_on_three_devices(backend: str, how: tuple[str, ...], tmp_path: Path):
    pytest.importorskip(backend)
    runs = result_of(start(backend, tmp_path, *how, script=RUNS.with_name("place_runs.py")))
    plain, placed = runs["plain"], runs["placed"]
    if backend == "torch":
        assert placed == plain  # the same operations, elsewhere
    for name in ("evaluate", "predict"):
        np.testing.assert_allclose(placed[name], plain[name], rtol=1e-5, atol=1e-5)
    for name, values in plain["history"].items():
        np.testing.assert_allclose(placed["history"][name], values, rtol=1e-5)
    for mine, theirs in zip(placed["weights"], plain["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    if backend != "torch":  # whose processors are one device
        check_devices(runs["devices"])
    assert "conv" in runs["unknown layer"]
    assert "nothing" in runs["unknown layer"]
    assert "cpu:0, cpu:1, cpu:2" in runs["unknown device"]
    # JAX has another plan, a mesh; TensorFlow can't move variables.
    assert ("place" in runs["no plan"]) == (backend != "jax")
    assert ("before the model is made" in runs["made before"]) == (backend == "tensorflow")


def check_devices(devices: dict[str, Any]) -> None:
    for path, device in devices.items():
        name = path.replace("optimizer/", "")
        expected = "cpu:0"
        if name.startswith(("conv", "norm")):
            expected = "cpu:1"
        elif name.startswith("block"):
            expected = "cpu:2"
        assert device == expected, path
    assert set(devices.values()) == {"cpu:0", "cpu:1", "cpu:2"}
    # What an optimizer keeps is beside what it is kept for.
    assert any(path.startswith("optimizer/block") for path in devices)
