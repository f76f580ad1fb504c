"""Scripts for TensorFlow's parameter servers run with the strategy's line changed, to the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_jobs import PATIENCE, make_cache

from insitu.base.paths import Paths

pytest.importorskip("tensorflow", reason="these scripts need TensorFlow: pip install tensorflow")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TUTORIALS = Path(__file__).parents[1] / "support" / "tutorials"
INSITU = [sys.executable, "-m", "insitu"]


def run(
    root: Path, script: str, workers: int, *arguments: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what `describe` says of a job of two servers, and the results of its workers."""
    paths, out = Paths(root / "home"), root / "out"
    for made in (paths.home, out):
        made.mkdir(exist_ok=True)
    make_cache(paths, root)
    environment = {
        **os.environ,
        "INSITU_HOME": str(paths.home),
        "NO_COLOR": "1",
        "KERAS_BACKEND": "tensorflow",
    }
    options = ["--workers", str(workers), "--ps", "2", "numbers", str(TUTORIALS)]
    done = subprocess.run(
        [*INSITU, "start", *options, f"{script}.py", str(out), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    describe = [*INSITU, "describe", done.stderr.splitlines()[0].strip(), "--json"]
    told = subprocess.run(describe, env=environment, capture_output=True, text=True, check=True)
    return json.loads(told.stdout), [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def assert_close(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def plain_loop() -> tuple[list[float], list[Any]]:
    """Return the losses and weights of a bare loop with the same updates."""
    import keras
    import tensorflow as tf
    from tutorials import servers_custom_loop as script

    model, optimizer = script.make_model()
    losses = []
    for features, labels in script.make_dataset(*script.make_layers()).take(script.EPOCHS * script.STEPS):
        with tf.GradientTape() as tape:
            loss = keras.losses.BinaryCrossentropy()(labels, model(features, training=True))
        # An Embedding's gradient names a row twice that a batch has twice. Added up, as insitu does.
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)]
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
    return losses, model.get_weights()


def test_a_coordinators_loop_on_one_worker_has_the_numbers_of_a_bare_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, (result,) = run(tmp_path, "servers_custom_loop", 1)
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path)])
    losses, weights = plain_loop()
    assert_close(result["losses"], losses)
    assert_close(result["weights"], weights)
    assert [server["applied"] for server in job["servers"]] == [24, 24]
    # The partitioner has cut the table of 8 rows and the kernel of 16 rows.
    rows = {(start, stop) for server in job["servers"] for _, start, stop, *_ in server["pieces"]}
    assert rows == {(0, 4), (4, 8), (0, 8), (8, 16), (0, 1)}
    assert [task["code"] for task in job["task_list"]] == [0, 0, 0]


@pytest.mark.parametrize("dies", [False, True])
def test_two_workers_share_the_functions_of_a_coordinator(tmp_path: Path, dies: bool) -> None:
    job, results = run(tmp_path, "servers_custom_loop", 2, *(["dies"] if dies else []))
    first, second = results
    assert len(job["attempts"]) == 1 and (tmp_path / "out" / "ran-on-1").exists()
    assert [first[key] for key in ("losses", "accuracies")] == [
        second[key] for key in ("losses", "accuracies")
    ]
    assert first["weights"] == second["weights"]
    assert len(first["losses"]) == 24 and np.mean(first["losses"][-8:]) < np.mean(first["losses"][:8])
    assert (first["attempt"], second["attempt"]) == (1, 2 if dies else 1)
    for server in job["servers"]:
        assert 24 <= server["applied"] <= 24 + dies, server


@pytest.mark.parametrize("workers", [1, 2])
def test_fit_on_servers_with_callbacks_that_set_the_learning_rate(tmp_path: Path, workers: int) -> None:
    _, results = run(tmp_path, "servers_fit", workers)
    plain = tmp_path / "plain"
    plain.mkdir()
    environment = {**os.environ, "TUTORIAL_STRATEGY": "default", "KERAS_BACKEND": "tensorflow"}
    command = [sys.executable, str(TUTORIALS / "servers_fit.py"), str(plain)]
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE)
    expected = json.loads((plain / "0.json").read_text())
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["history"]["learning_rate"][-1] <= expected["history"]["learning_rate"][-1] * 1.001
        assert result["history"]["loss"][-1] < result["history"]["loss"][0] / 2
    if workers == 1:
        assert_close(results[0]["history"]["loss"], expected["history"]["loss"])
        assert_close(results[0]["history"]["learning_rate"], expected["history"]["learning_rate"])
        assert_close(results[0]["weights"], expected["weights"])
