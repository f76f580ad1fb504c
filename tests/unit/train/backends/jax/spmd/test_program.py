"""One program over several devices of JAX: the same as one device, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_checks import DEADLINE, RUNS, result_of, run_tasks, start

pytest.importorskip("jax")

SCRIPT = RUNS.with_name("mesh_runs.py")


@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.long
class TestMesh:
    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        return result_of(start("jax", tmp_path_factory.mktemp("mesh"), "alone", script=SCRIPT))

    @pytest.fixture(scope="class")
    @classmethod
    def more(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        folder = tmp_path_factory.mktemp("mesh")
        return result_of(start("jax", folder / "home", "more", str(folder / "checkpoints"), script=SCRIPT))

    @pytest.mark.slow
    def test_one_program_over_two_processes(self, runs: Any, tmp_path: Path) -> None:
        first, second = run_tasks("jax", tmp_path, 2, script=SCRIPT)
        assert first == second
        assert first.pop("devices") == 4
        self.assert_near(first, runs["plain"])

    @pytest.mark.slow
    def test_a_model_spread_in_each_of_two_processes(self, runs: Any, tmp_path: Path) -> None:
        first, second = run_tasks("jax", tmp_path, 2, "spread", script=SCRIPT)
        assert first == second
        assert first.pop("devices") == 4
        mine, theirs = first.pop("loop"), runs["loop"]
        self.assert_near(first, runs["plain"])
        # Half of the largest axis is on each of a task's two devices.
        assert mine["shapes"] == [[3, 2], [4], [2, 2], [2]]
        np.testing.assert_allclose(mine["losses"], theirs["losses"], rtol=1e-5)
        for a, b in zip(mine["weights"], theirs["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    @staticmethod
    def assert_near(mine: Any, theirs: Any) -> None:
        for name in theirs.keys() - {"digest", "history"}:
            for a, b in zip(mine[name], theirs[name], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert mine["history"].keys() == theirs["history"].keys()
        for name, values in theirs["history"].items():
            np.testing.assert_allclose(mine["history"][name], values, rtol=1e-5)

    @pytest.mark.slow
    def test_one_device_gives_the_bits_of_plain_keras(self, more: Any) -> None:
        assert more["one"] == more["plain"]

    def test_rows_that_do_not_divide_count_once_each(self, runs: Any) -> None:
        self.assert_near(runs["three"], runs["plain"])

    @pytest.mark.slow
    def test_without_compilation(self, more: Any) -> None:
        plain, eager = more["eager"]
        self.assert_near(eager, plain)

    @pytest.mark.slow
    def test_a_restart_in_the_middle_of_an_epoch_gives_the_same_bits(self, more: Any) -> None:
        resumed = more["resumed"]
        assert resumed["failed"]
        # Four steps an epoch; the last checkpoint before the failure is behind step 2 of the second.
        assert resumed["steps"] == 2
        assert resumed["again"] == resumed["undisturbed"]

    @pytest.mark.slow
    def test_clipping_averages_and_accumulation(self, more: Any) -> None:
        plain, mesh = more["optimized"]
        self.assert_near(mesh, plain)

    def test_a_train_step_and_a_sum_of_the_users_own(self, runs: Any) -> None:
        plain, mesh = runs["own"]
        self.assert_near(mesh, plain)

    @pytest.mark.slow
    def test_each_number_of_rows_is_compiled_once(self, more: Any) -> None:
        assert more["two matches"] == [2, 2]

    def test_variables_over_two_devices_and_rows_over_two(self, runs: Any) -> None:
        self.assert_near(runs["spread"], runs["plain"])
        shards = runs["spread"]["shards"]
        # Half of the columns of 3 x 4, also of what the optimizer keeps; biases whole.
        kernels = [shape for path, shape in shards.items() if "dense" in path and "kernel" in path]
        assert [3, 2] in kernels
        assert [4, 1] in kernels
        assert len(kernels) == 6
        assert all(shape in ([4], [2]) for path, shape in shards.items() if "bias" in path)

    def test_what_does_not_fit_is_refused(self, runs: Any) -> None:
        for said, wanted in zip(
            runs["refused"],
            ("multiply to", "'data', 'model'", "divisible", "regular expression"),
            strict=True,
        ):
            assert wanted in said
