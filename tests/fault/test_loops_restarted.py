"""A custom loop that continues from a checkpoint of its own gets the rows that it would have got."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_jobs import PATIENCE, assert_every_row_once

from insitu.base.paths import Paths
from insitu.grid import bring_up, import_cache

SUPPORT = Path(__file__).parents[1] / "support"
EPOCHS, STEPS = 4, 6
pytestmark = [pytest.mark.timeout(800), pytest.mark.long]


class Loops:
    """Runs `restarted_loop.py` as a job on a cache of 37 rows in 4 partitions."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.paths = Paths(root / "home")
        bring_up(self.paths, 2)
        rows = np.random.default_rng(0).normal(size=37).astype("float32")
        np.savez(root / "rows.npz", x=rows)
        import_cache(self.paths, "rows", [str(root / "rows.npz")], partitions=4)
        self._environment = {**os.environ, "INSITU_HOME": str(self.paths.home), "NO_COLOR": "1"}
        self._undisturbed: dict[Any, list[Any]] = {}
        self._environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SUPPORT)}

    def insitu(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "insitu", *arguments]
        environment = {**self._environment, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)

    def undisturbed(self, way: str, **options: Any) -> list[Any]:
        """Return what `run` returns last, of a job that nothing is killed in."""
        key = way, *options.items()
        if key not in self._undisturbed:
            self._undisturbed[key] = [*self.run(way, **options)[2:]]
        return self._undisturbed[key]

    def run(
        self,
        way: str,
        *kills: str,
        workers: int = 2,
        backend: str = "tensorflow",
        max_restarts: int = 3,
        code: int = 0,
    ) -> tuple[dict[str, Any], str, dict[Any, Any], dict[Any, Any]]:
        """Return (what `describe --ledger` says, what was printed, the sums of the rows of each step over all
        tasks, the weights by task)."""
        out = self._root / f"out-{len(list(self._root.glob('out-*')))}"
        out.mkdir()
        (self._root / "job").mkdir(exist_ok=True)
        shutil.copy(SUPPORT / "restarted_loop.py", self._root / "job")
        done = self.insitu(
            *("start", "--workers", str(workers), "--max-restarts", str(max_restarts)),
            *("rows", str(self._root / "job")),
            *("restarted_loop.py", str(out), way, *kills),
            KERAS_BACKEND=backend,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == code, printed[-4000:]
        assert sorted(path.name for path in out.glob("injected-*")) == sorted(f"injected-{k}" for k in kills)
        job = done.stderr.splitlines()[0].strip()
        described = json.loads(self.insitu("describe", job, "--ledger", "--json").stdout)
        given: dict[Any, Any] = {}
        weights: dict[Any, Any] = {}
        for task in range(workers):
            for line in (out / f"{task}.jsonl").read_text().splitlines():
                first, *rest = json.loads(line)
                if first == "weights":
                    weights[task] = rest[0]
                else:
                    given[task, first, rest[0]] = rest[1]
        return described, printed, given, weights


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(tmp_path_factory.mktemp("loops"))


def assert_same(
    loops: Loops, way: str, kills: Sequence[str], max_restarts: int = 3, **options: Any
) -> dict[str, Any]:
    expected = loops.undisturbed(way, **options)
    job, printed, *found = loops.run(way, *kills, max_restarts=max_restarts, **options)
    assert printed.count("was killed by SIGKILL; restarting every task") == len(kills)
    assert found == expected
    workers = options.get("workers", 2)
    steps = 3 if way == "set_epoch" else STEPS if workers == 2 else 5
    assert len(expected[0]) == workers * EPOCHS * steps
    return job


@pytest.mark.parametrize(
    ("way", "kills"),
    [
        pytest.param("weights", ["2:begin"], marks=pytest.mark.slow),
        pytest.param("nothing", ["2:3"], marks=pytest.mark.slow),
        ("state_dict", ["0:2", "2:1", "3:begin"]),
        ("checkpoint", ["1:3", "3:0"]),
        ("set_epoch", ["2:1"]),
    ],
)
def test_a_restarted_loop_gets_the_rows_of_one_without_a_failure(
    loops: Loops, way: str, kills: list[str]
) -> None:
    job = assert_same(loops, way, kills)
    if way != "set_epoch":
        assert_every_row_once(job, EPOCHS)


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize(
    ("way", "kills"), [("weights", ["1:2"]), pytest.param("state_dict", ["2:3"], marks=pytest.mark.slow)]
)
def test_on_other_backends(loops: Loops, backend: str, way: str, kills: list[str]) -> None:
    assert_every_row_once(assert_same(loops, way, kills, backend=backend), EPOCHS)


@pytest.mark.parametrize("way", [pytest.param("weights", marks=pytest.mark.slow), "nothing"])
def test_in_one_task(loops: Loops, way: str) -> None:
    assert_every_row_once(assert_same(loops, way, ["2:1"], workers=1), EPOCHS)


def test_a_loop_that_goes_on_within_an_epoch_must_say_it(loops: Loops) -> None:
    job, printed, *_ = loops.run("steps", "2:1", code=1)
    assert job["attempt"] == 2
    told = re.sub(r"\s+", " ", printed)
    assert "UnknownPosition" in told and "had come to epoch 2" in told
    assert "tf.train.Checkpoint(data=data, ...)" in told and "data.set_epoch(N)" in told
    assert "<insitu.dataset('rows').shuffle(" in told and "so it is not tried again" in told


def test_a_loop_that_comes_further_between_its_failures_goes_on(loops: Loops) -> None:
    """One more kill than `--max-restarts` allows, each in a later epoch, which has the failure forgotten."""
    job = assert_same(loops, "weights", ["2:1", "3:4"], max_restarts=1)
    assert job["attempt"] == 3
    assert_every_row_once(job, EPOCHS)


KILL_AFTER_THE_THIRD_SAVE = """
import os, signal
import tensorflow as tf
save = tf.train.CheckpointManager.save


def save_and_die(manager):
    path = save(manager)
    if path.endswith("-3") and os.environ.get("KILL") and not os.path.exists("injected"):
        open("injected", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


tf.train.CheckpointManager.save = save_and_die
"""


def test_the_loop_of_the_documents_survives_a_kill_within_an_epoch(loops: Loops, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanations" / "reliability.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    printed = []
    for kill in ("", "1"):
        folder = tmp_path / f"job{kill}"
        folder.mkdir()
        (folder / "loop.py").write_text(KILL_AFTER_THE_THIRD_SAVE + script)
        arguments = ["start", "--workers", "2", "rows", str(folder), "loop.py"]
        done = loops.insitu(*arguments, KERAS_BACKEND="tensorflow", KILL=kill)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert ("restarting every task" in done.stdout + done.stderr) is bool(kill)
        printed.append(set(re.findall(r"\] (update .*|weights .*)", done.stdout + done.stderr)))
    assert len(printed[0]) == EPOCHS * STEPS + 1
    assert printed[0] == printed[1]
