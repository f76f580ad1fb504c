"""A job under chaos ends as an undisturbed one: `insitu chaos` says so, and is right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from insitu.base.paths import Paths
from insitu.grid import bring_up, import_cache

JOB = Path(__file__).parents[1] / "support" / "chaos_job"
REPORT = os.environ.get("INSITU_CHAOS_REPORT")
"""The Markdown file that the long runs are to be told in."""
SEED = os.environ.get("INSITU_CHAOS_SEED", "1")
FAULTS = int(os.environ.get("INSITU_CHAOS_FAULTS", "1000"))


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
        env={**os.environ, "INSITU_HOME": str(paths.home), "NO_COLOR": "1", "KERAS_BACKEND": "jax"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The command itself gives each of its two runs no more than `patience`, and then ends it.
        timeout=2 * patience + 15,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}"
    return done.stdout


def injected(told: str) -> int:
    found = re.search(r"(\d+) of \d+ faults injected", told)
    assert found is not None, told
    return int(found[1])


def given(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


TWENTY = [
    "kill worker:1 1.1", "controller 1.3", "delay worker:0 1.5", "checkpoint 2.1", "controller 2.3",
    "checkpoint 2.5", "delay worker:0 3.1", "controller 3.3", "checkpoint 3.5", "delay worker:1 4.1",
    "controller 4.2", "delay worker:1 4.3", "checkpoint 4.5", "controller 5.1", "scale 5.3",
    "checkpoint 6.1", "controller 6.3", "scale 6.5", "delay worker:0 7.1", "kill worker:1 8.1",
]  # fmt: skip
"""Those that name worker 1 come once it is back."""


@pytest.mark.timeout(400)
@pytest.mark.long
def test_twenty_faults_change_nothing(tmp_path: Path) -> None:
    told = chaos(
        tmp_path, "exchange", 40, "--workers", "2", "--on-loss", "adopt", *given(*TWENTY), patience=180.0
    )
    assert injected(told) == 20, told
    assert "0 restarts of all tasks" in told, told


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_one_that_is_stuck_is_found_and_replaced_alone(tmp_path: Path) -> None:
    faults = given("stop worker:1 1.3", "delay worker:0 3.1", "kill worker:1 5.1", "checkpoint 6.1")
    told = chaos(tmp_path, "exchange", 12, "--stall-timeout", "40", *faults, patience=220.0)
    assert injected(told) == 4, told
    assert "0 restarts of all tasks" in told, told


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_what_takes_disk_node_and_network_away_changes_nothing(tmp_path: Path) -> None:
    faults = given(
        "drop worker:1 1.2", "disk 3.1", "disk worker:0 5.1", "half-open worker:1 6.2", "node worker:0 9.1"
    )
    told = chaos(tmp_path, "exchange", 20, "--stall-timeout", "15", *faults, patience=220.0)
    assert injected(told) == 5, told


@dataclass(frozen=True)
class Way:
    """A way of training under chaos. `kinds` are drawn as often as they say, of all faults a `share`."""

    script: str
    options: tuple[str, ...]
    kinds: dict[str, int]
    share: float


APART = {"kill": 12, "delay": 8, "drop": 6, "controller": 8, "checkpoint": 6, "stop": 1, "half-open": 1}
"""For workers that can continue without each other."""
TOGETHER = {"kill": 3, "delay": 8, "controller": 8, "checkpoint": 6}
"""For those that can't: each death begins all of them anew."""
WAYS = {
    "replaced": Way("exchange", ("--workers", "2"), APART | {"disk": 1}, 0.4),
    "adopted": Way("exchange", ("--workers", "3", "--on-loss", "adopt"), APART | {"scale": 2}, 0.4),
    "devices": Way("devices", ("--workers", "1"), TOGETHER, 0.1),
    "xla": Way("xla", ("--workers", "2"), TOGETHER, 0.1),
}


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", WAYS)
def test_a_thousand_faults_change_nothing(tmp_path: Path, name: str) -> None:
    """Over all ways; INSITU_CHAOS_FAULTS says otherwise."""
    way = WAYS[name]
    count = round(way.share * FAULTS)
    kinds = ",".join(kind for kind, weight in way.kinds.items() for _ in range(weight))
    report = ("--report", REPORT) if REPORT else ()
    drawn = ("--faults", str(count), "--seed", SEED, "--kinds", kinds)
    # Steps are slow only while faults come: there are enough for the longest recoveries.
    told = chaos(
        tmp_path,
        way.script,
        3 * count + 60,
        *way.options,
        *report,
        *drawn,
        "--stall-timeout",
        "20",
        patience=7200.0,
    )
    assert injected(told) > 0.8 * count, told
