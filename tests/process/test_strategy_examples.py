"""One script for each way, under each strategy, by changing one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import example_runs
import pytest

STRATEGIES = {
    "MultiWorkerMirroredStrategy": example_runs.LINE,
    "OneDeviceStrategy": "strategy = insitu.OneDeviceStrategy('cpu:1')\n",
    "MirroredStrategy": "strategy = insitu.MirroredStrategy()\n",
    "CentralStorageStrategy": "strategy = insitu.CentralStorageStrategy()\n",
    "ModelParallelStrategy": "(strategy := insitu.ModelParallelStrategy()).place({'dense': 'cpu:1'})\n",
    "ParameterServerStrategy": "strategy = insitu.ParameterServerStrategy(mode='sync')\n",
}
NEEDS_TPU = {"TPUStrategy"}
WAYS = ("fit", "custom_loop", "low_level")
NEEDS_TABLES = {"HybridStrategy"}
"""Of tables on servers: see `insitu.layers.Embedding`. The examples' models have none."""


def run(folder: Path, backend: str, strategies: dict[str, str], ways: tuple[str, ...]) -> dict[str, float]:
    """What accuracy each example came to, by `way/strategy`."""
    done = subprocess.run(
        [sys.executable, example_runs.__file__, str(folder), json.dumps(strategies), json.dumps(ways)],
        env={**os.environ, "KERAS_BACKEND": backend, "INSITU_VIRTUAL_DEVICES": "cpu:2"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS"))
    results: dict[str, float] = json.loads(line.removeprefix("RESULTS"))
    return results


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_the_low_level_example_learns(tmp_path: Path, backend: str):
    name = "MultiWorkerMirroredStrategy"
    assert run(tmp_path, backend, {name: STRATEGIES[name]}, ("low_level",))[f"low_level/{name}"] > 0.9


def test_every_strategy_that_runs_here_is_one_of_those_below():
    import insitu

    exported = {name for name in insitu.__all__ if name.endswith("Strategy") and name != "Strategy"}
    assert exported == {*STRATEGIES, *NEEDS_TPU, *NEEDS_TABLES}


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_one_line_chooses_the_strategy(tmp_path: Path, backend: str):

    results = run(tmp_path, backend, STRATEGIES, WAYS)
    assert {
        name: found for name, found in results.items() if not isinstance(found, float) or found <= 0.9
    } == {}
