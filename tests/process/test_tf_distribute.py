"""Custom loops give what tf.distribute gives, in the same process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

SCRIPT = Path(__file__).parents[1] / "support" / "tf_distribute_runs.py"


def assert_close(ours: Any, theirs: Any, case: str) -> None:
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), case
        for mine, wanted in zip(ours, theirs, strict=True):
            assert_close(mine, wanted, case)
    else:
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), case


@pytest.mark.long
def test_custom_loops_give_the_numbers_of_tf_distribute() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(cases) == 8
    for name, theirs, ours in cases:
        assert_close(ours, theirs, name)
