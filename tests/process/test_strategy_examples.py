"""One script for each way, under each strategy, by changing one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "strategies"
LINE = "strategy = insitu.MultiWorkerMirroredStrategy()\n"
STRATEGIES = {
    "MultiWorkerMirroredStrategy": LINE,
    "OneDeviceStrategy": "strategy = insitu.OneDeviceStrategy('cpu:1')\n",
    "MirroredStrategy": "strategy = insitu.MirroredStrategy()\n",
    "CentralStorageStrategy": "strategy = insitu.CentralStorageStrategy()\n",
    "ModelParallelStrategy": "(strategy := insitu.ModelParallelStrategy()).place({'dense': 'cpu:1'})\n",
    "ParameterServerStrategy": "strategy = insitu.ParameterServerStrategy('sync')\n",
}
NEEDS_TPU = {"TPUStrategy"}


def run(tmp_path: Path, backend: str, way: str, line: str) -> float:
    """The accuracy that the example prints."""
    text = (FOLDER / f"{way}.py").read_text()
    assert text.count(LINE) == 1
    (tmp_path / "data.py").write_text((FOLDER / "data.py").read_text())
    script = tmp_path / f"{way}.py"
    script.write_text(text.replace(LINE, line))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "KERAS_BACKEND": backend, "INSITU_VIRTUAL_DEVICES": "cpu:2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^accuracy ([0-9.]+) on \d+ replicas$", done.stdout, re.M)
    assert found, done.stdout
    return float(found[1])


def test_the_low_level_example_learns(tmp_path: Path):
    assert run(tmp_path, "jax", "low_level", LINE) > 0.9


def test_every_strategy_that_runs_here_is_one_of_those_below():
    import insitu

    exported = {name for name in insitu.__all__ if name.endswith("Strategy")}
    assert exported <= {*STRATEGIES, *NEEDS_TPU}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["fit", "custom_loop", "low_level"])
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_one_line_chooses_the_strategy(tmp_path: Path, backend: str, way: str, strategy: str):
    import insitu

    if (strategy, way) == ("ParameterServerStrategy", "custom_loop"):
        pytest.skip("steps that train are refused in strategy.run under parameter servers")
    if strategy not in insitu.__all__:
        pytest.skip(f"{strategy} isn't there yet")
    assert run(tmp_path, backend, way, STRATEGIES[strategy]) > 0.9
