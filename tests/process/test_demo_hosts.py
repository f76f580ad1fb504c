"""`make demo HOSTS=3` shows what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts_lab import find_obstacle

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "demo_hosts.py"


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_host_is_lost_another_one_joins_and_the_bits_stay() -> None:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    done = subprocess.run(
        [sys.executable, str(DEMO), "--hosts", "3"],
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits" in done.stdout and "host2 loses its power" in done.stdout
    assert "left on 4 hosts: 0 processes, 0 files of shared memory" in done.stdout
