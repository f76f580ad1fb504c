"""What must hold on each backend beside TensorFlow. A backend is chosen once in a process, so each runs in
processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from free_ports import free_addresses
from models import check_mixed_precision

RUNS = Path(__file__).with_name("backend_runs.py")
WITHOUT_TENSORFLOW = RUNS.with_name("without_tensorflow.py")
DEADLINE = 400.0
"""Seconds for all runs of one process on a machine with other work."""


def script_for(backend: str, script: Path) -> list[str]:
    """What runs `script` in a process of `backend`: those of JAX don't load TensorFlow."""
    return [str(WITHOUT_TENSORFLOW), str(script)] if backend == "jax" else [str(script)]


def start(
    backend: str, home: Path, *arguments: str, script: Path = RUNS, **environment: str
) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("INSITU_") and k != "TF_CONFIG"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, *script_for(backend, script), *arguments],
        env={**inherited, **threads, "KERAS_BACKEND": backend, "INSITU_HOME": str(home), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> Any:
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(
        next(line for line in output.splitlines() if line.startswith("RESULTS"))[len("RESULTS") :]
    )


def start_tasks(
    backend: str, home: Path, count: int, what: str, script: Path = RUNS
) -> list[subprocess.Popen[str]]:
    """One process for each of `count` shards."""
    cluster = {"worker": free_addresses(count)}
    return [
        start(
            backend,
            home,
            what,
            script=script,
            INSITU_SHARDS=f"{index}/{count}",
            INSITU_TASK=f"worker:{index}",
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
        )
        for index in range(count)
    ]


def run_tasks(backend: str, home: Path, count: int, what: str = "task", script: Path = RUNS) -> list[Any]:
    processes = start_tasks(backend, home, count, what, script)
    try:
        return [result_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(2 * DEADLINE)
class BackendChecks:
    """A subclass names its backend."""

    backend: str

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        folder = tmp_path_factory.mktemp(cls.backend)
        # Programs that several of its runs have in common are compiled once.
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        compiled["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        return result_of(
            start(cls.backend, folder / "home", "alone", str(folder / "checkpoints"), **compiled)
        )

    @pytest.fixture(scope="class")
    @classmethod
    def tasks(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        return run_tasks(cls.backend, tmp_path_factory.mktemp("tasks"), 2)

    def test_two_processes_give_the_bits_and_logs_of_one(self, alone: Any, tasks: Any) -> None:
        for task in tasks:
            assert task == alone["two"]

    def test_dropout_and_batch_norm_see_the_shards(self, alone: Any) -> None:
        assert alone["two"]["digest"] != alone["one"]["digest"]
        # Each step draws once, whoever had rows in it, and leaves the seed as it was.
        assert alone["two"]["seeds"] == alone["one"]["seeds"] == alone["plain"]["seeds"] != []

    def test_predictions_draw_on(self, alone: Any) -> None:
        plain, one, two = (alone[name]["drawn"] for name in ("plain", "one", "two"))
        assert one == plain and two["seed"] == plain["seed"]
        first, second = np.array(two["predicted"])
        assert (first != second).any() and two["tested"][0] != two["tested"][1]
        # Rows of a batch are in both shards, each with random numbers of its own.
        assert (first[:2] != first[2:4]).any()

    def test_a_restart_in_the_middle_of_an_epoch_gives_the_same_bits(self, alone: Any) -> None:
        resumed = alone["resumed"]
        assert resumed["failed"]
        # Four steps an epoch; the last checkpoint before the failure is behind step 2 of the second.
        assert resumed["steps"] == resumed["distinct"] == 1 + 4
        for name in ("digest", "evaluate", "predict"):
            assert resumed[name] == alone["two"][name]
        for name, values in resumed["history"].items():
            assert values == alone["two"]["history"][name]

    def test_a_train_step_of_the_users_own(self, alone: Any) -> None:
        plain, *others = alone["own"]
        for other in others:
            np.testing.assert_allclose(other["history"]["my_loss"], plain["history"]["my_loss"], rtol=1e-5)
            for mine, theirs in zip(other["weights"], plain["weights"], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5)

    def test_training_goes_on_after_weights_became_their_averages(self, alone: Any) -> None:
        one, two, _ = alone["averaged"]
        np.testing.assert_allclose(two["single"], one["single"], rtol=1e-5)
        np.testing.assert_allclose(two["history"]["loss"], one["history"]["loss"], rtol=1e-5)
        for mine, theirs in zip(two["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)

    def test_prediction_before_any_fit_changes_nothing(self, alone: Any) -> None:
        _, without, first = alone["averaged"]
        predicted = first.pop("predicted")
        np.testing.assert_allclose(predicted, np.repeat(np.array([first["wanted"]]).T, 2, 1), atol=1e-5)
        assert first == {name: value for name, value in without.items() if name != "predicted"}

    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
    def test_half_precision_trains_as_without_a_strategy(self, alone: Any, policy: str) -> None:
        runs = alone["mixed"][policy]
        check_mixed_precision(runs)
        # The scale begins at 2**15, and the step that was too large has halved it.
        wanted = (2, 2.0**14) if policy == "mixed_float16" else (3, None)
        assert (runs[0]["iterations"], runs[0]["scale"]) == wanted
