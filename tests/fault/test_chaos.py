"""A job under chaos ends as an undisturbed one: `insitu chaos` says so, and is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from insitu.grid import bring_up, import_cache
from insitu.paths import Paths

JOB = Path(__file__).parents[1] / "support" / "chaos_job"
REPORT = os.environ.get("INSITU_CHAOS_REPORT")
"""The Markdown file that the long runs are to be told in."""


def chaos(root: Path, way: str, epochs: int, *options: str, patience: float) -> str:
    """What `insitu chaos` printed; fails unless its verdict is good."""
    paths = Paths(root / "home")
    (root / "images").mkdir()
    rng = np.random.default_rng(5)
    for label in range(4):
        np.save(root / "images" / f"{label}.npy", rng.integers(0, 16, (80 + label, 8, 8)).astype(np.uint8))
    bring_up(paths, 2)
    split = {"train": 0.9, "test": 0.1}
    source = [str(root / "images")]
    import_cache(paths, "images", source, partitions=4, backups=1, label_from_filename=True, split=split)
    command = [sys.executable, "-m", "insitu", "chaos", *options, "--patience", str(patience), "images/train"]
    done = subprocess.run(
        [*command, str(JOB), "train.py", way, str(epochs)],
        env={**os.environ, "INSITU_HOME": str(paths.home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        # The command itself gives each of its two runs no more than `patience`, and then ends it.
        timeout=2 * patience + 15,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}\n{done.stderr}"
    return done.stdout


def injected(told: str) -> int:
    found = re.search(r"(\d+) of \d+ faults injected", told)
    assert found is not None, told
    return int(found[1])


def given(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


@pytest.mark.timeout(200)
def test_a_death_that_is_adopted_and_a_change_of_size_change_nothing(tmp_path: Path) -> None:
    faults = given("kill worker:1 1.1", "controller 2.1", "scale 3.1", "scale 4.1")
    told = chaos(tmp_path, "exchange", 10, "--workers", "2", "--on-loss", "adopt", *faults, patience=80.0)
    assert injected(told) == 4, told
    assert "0 restarts of all tasks" in told, told


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_one_that_is_stuck_is_found_and_replaced_alone(tmp_path: Path) -> None:
    faults = given("stop worker:1 1.3", "delay worker:0 3.1", "kill worker:1 5.1", "checkpoint 6.1")
    told = chaos(tmp_path, "exchange", 12, "--stall-timeout", "25", *faults, patience=220.0)
    assert injected(told) == 4, told
    assert "0 restarts of all tasks" in told, told


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_twenty_faults_change_nothing(tmp_path: Path) -> None:
    kinds = "kill,kill,delay,drop,controller,checkpoint,scale"
    options = ("--workers", "2", "--faults", "20", "--seed", "7", "--kinds", kinds)
    told = chaos(tmp_path, "exchange", 60, *options, patience=220.0)
    assert injected(told) >= 18, told
    assert "0 restarts of all tasks" in told, told


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_what_takes_disk_node_and_network_away_changes_nothing(tmp_path: Path) -> None:
    faults = given(
        "drop worker:1 1.2", "disk 3.1", "disk worker:0 5.1", "half-open worker:1 6.2", "node worker:0 9.1"
    )
    told = chaos(tmp_path, "exchange", 20, "--stall-timeout", "15", *faults, patience=220.0)
    assert injected(told) == 5, told


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    "way, options",
    [
        ("exchange", ("--workers", "2", "--on-loss", "replace")),
        ("exchange", ("--workers", "3", "--on-loss", "adopt")),
        ("devices", ("--workers", "1")),
        ("xla", ("--workers", "2")),
    ],
)
def test_hundreds_of_faults_change_nothing(tmp_path: Path, way: str, options: tuple[str, ...]) -> None:
    """250 each unless INSITU_CHAOS_FAULTS says otherwise."""
    count = int(os.environ.get("INSITU_CHAOS_FAULTS", "250"))
    report = ("--report", REPORT) if REPORT else ()
    chosen = (*options, *report, "--stall-timeout", "20", "--faults", str(count), "--seed", "1")
    told = chaos(tmp_path, way, 8 * count, *chosen, patience=7200.0)
    assert injected(told) > 0.9 * count, told
