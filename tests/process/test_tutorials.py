"""Scripts of the shape of TensorFlow's tutorials on distribution give the numbers of plain Keras.

Nothing but the strategy changes: two devices of one process, or a job of two workers.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_jobs import PATIENCE

from insitu.base.paths import Paths
from insitu.grid import bring_up, import_cache

pytest.importorskip("tensorflow")

SCRIPTS = Path(__file__).parents[1] / "support" / "tutorials"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a script under a strategy, once. Returns what each task reported."""
    root = tmp_path_factory.mktemp("tutorials")

    @functools.cache
    def run(script: str, strategy: str) -> list[dict[str, Any]]:
        results = root / f"{script}-{strategy}"
        results.mkdir()
        environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "TUTORIAL_STRATEGY": strategy,
            "TUTORIAL_RESULTS": str(results),
            "INSITU_HOME": str(root / "home"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, f"{script}.py"]
        if strategy == "workers":
            start = [sys.executable, "-m", "insitu", "start", "--workers", "2", "--max-restarts", "0"]
            command = [*start, a_cache(), str(SCRIPTS), f"{script}.py"]
        done = subprocess.run(
            command, env=environment, cwd=SCRIPTS, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert "Exception ignored" not in done.stdout + done.stderr
        return [json.loads(path.read_text()) for path in sorted(results.glob("worker-*.json"))]

    @functools.cache
    def a_cache() -> str:
        np.save(root / "rows.npy", np.zeros((4, 1), "float32"))
        paths = Paths(root / "home")
        bring_up(paths, 1)
        import_cache(paths, "rows", [str(root / "rows.npy")], partitions=2)
        return "rows"

    return run


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        ("custom_training", "mirrored"),
        ("multi_worker_loop", "workers"),
        *(
            pytest.param(script, strategy, marks=slow)
            for script, strategy in [
                ("custom_training", "workers"),
                ("keras_fit", "mirrored"),
                ("keras_fit", "workers"),
                ("multi_worker_keras", "mirrored"),
                ("multi_worker_keras", "workers"),
                ("multi_worker_loop", "mirrored"),
                ("input_data", "mirrored"),
                ("input_data", "workers"),
                ("save_and_load", "mirrored"),
                ("save_and_load", "workers"),
            ]
        ),
    ],
)
@pytest.mark.long
def test_a_tutorial_gives_the_numbers_of_plain_keras(run: Any, script: str, strategy: str) -> None:
    (wanted,) = run(script, "default")
    tasks = run(script, strategy)
    assert len(tasks) == (2 if strategy == "workers" else 1)
    for task in tasks:
        for name, value in wanted.items():
            np.testing.assert_allclose(task[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
