"""Custom loops on JAX and PyTorch take the calls of tf.distribute, and give the numbers of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_jobs import PATIENCE

SUPPORT = Path(__file__).parents[1] / "support"
ROWS, BATCH, RATE = 22, 8, 0.1
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")
BACKENDS = ["jax", pytest.param("torch", marks=pytest.mark.torch)]


def plain(epochs: int) -> tuple[list[float], np.ndarray, float]:
    """Return the losses of the steps, kernel and bias of gradient descent on one device."""
    kernel, bias, losses = np.zeros((3, 1)), 0.0, []
    for start in [*range(0, ROWS, BATCH)] * epochs:
        x, y = X[start : start + BATCH], Y[start : start + BATCH]
        error = x @ kernel + bias - y
        losses.append(float((error**2).mean()))
        kernel, bias = kernel - RATE * 2 * x.T @ error / len(x), bias - RATE * 2 * float(error.mean())
    return losses, kernel, bias


def run(tmp_path: Path, backend: str, way: str) -> list[dict[str, Any]]:
    """Return what each task of `loop_calls.py` has found."""
    out = tmp_path / "out"
    out.mkdir()
    environment = {**os.environ, "KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    environment["PYTHONPATH"] = str(SUPPORT)
    command = [sys.executable, str(SUPPORT / "loop_calls.py"), way, str(out)]
    if way == "workers":
        (tmp_path / "job").mkdir()
        start = [sys.executable, "-m", "insitu", "start", "--workers", "2", "--max-restarts", "0"]
        command = [*start, "-", str(tmp_path / "job"), *command]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "Traceback" not in done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["mirrored", "workers"])
@pytest.mark.long
def test_calls_in_a_loop_give_the_numbers_of_one_device(tmp_path: Path, backend: str, way: str) -> None:
    losses, kernel, bias = plain(2)
    tasks = run(tmp_path, backend, way)
    assert len(tasks) == (1 if way == "mirrored" else 2)
    for task in tasks:
        trained, own, places = (task[name] for name in ("trained", "trained_on_own_data", "places"))
        np.testing.assert_allclose(trained["losses"], losses, rtol=1e-4)
        np.testing.assert_allclose(trained["weights"], [*kernel[:, 0], bias], rtol=1e-4, atol=1e-6)
        # Each row is seen once, whoever has read it.
        assert (trained["seen"], own["seen"]) == (2 * ROWS, ROWS)
        np.testing.assert_allclose(own["losses"][0], (Y[:BATCH] ** 2).mean(), rtol=1e-4)
        assert own["steps"] == len(own["losses"]) == 3
        accumulated = np.array([*(X[:5].T @ Y[:5])[:, 0], float(Y[:5].sum())]) * 2 / 5 * RATE
        np.testing.assert_allclose(task["accumulated"]["weights"], accumulated, rtol=1e-4)
        assert places["outside"] == [True, True, True, True]
        assert places["inside"] == [True, False, True, 2]
        assert places["reduced"] == [13.0, 6.5] and places["gathered"] == [1.0, 12.0]
        result, updated = task["refused"]["told"]
        assert "depends on" in result and "can't read them after optimizer.apply()" in updated
        assert set(task["refused"]["sums"]) == {12.0} and task["refused"]["seen"] == 24
    mine = [value for task in tasks for value in task["places"]["mine"]]
    assert mine == [1.0, 12.0]
    chief = tasks[0]["work_of_the_chief"]
    np.testing.assert_allclose(chief["kernel"], kernel, rtol=1e-4, atol=1e-6)
    expected = X @ kernel + bias
    np.testing.assert_allclose(chief["predicted"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(chief["loaded"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(chief["evaluated"], ((expected - Y) ** 2).mean(), rtol=1e-4)
    assert way == "mirrored" or tasks[1]["work_of_the_chief"] == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_coordinators_functions_give_the_numbers_of_one_device(tmp_path: Path, backend: str) -> None:
    losses, kernel, bias = plain(1)
    (task,) = run(tmp_path, backend, "servers")
    np.testing.assert_allclose(task["coordinated"]["losses"], losses, rtol=1e-4)
    np.testing.assert_allclose(task["coordinated"]["weights"], [*kernel[:, 0], bias], rtol=1e-4, atol=1e-6)
    assert task["coordinated"]["seen"] == ROWS
