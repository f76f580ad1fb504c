"""Losses that divide by something else than rows give plain Keras' numbers over several shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import loss_runs
import numpy as np
import pytest
from backend_checks import result_of, script_for

import insitu.exchange
from insitu.exchange import Group
from insitu.train.fit.two_phase import with_totals
from insitu.train.replica import LossCounts, NeedsTotals, ShardBatch

pytestmark = pytest.mark.timeout(450)
ROUNDING = 1e-5
FEW = ("mask", "ignored class", "one number with weights", "sum with mask")
GLOBAL = ("global", "global towers", "global with mask and weights", "one of several outputs global")
COMBINED = (
    "mask",
    "mask and weights of steps",
    "ignored class",
    "mean by weights",
    "sum",
    "one number",
    "global",
    "several outputs",
)
"""Each of their parts is in another case too."""
EACH_PART = [each for each in loss_runs.CASES if each not in COMBINED]


@pytest.mark.parametrize(
    "case", [*EACH_PART, *(pytest.param(each, marks=pytest.mark.slow) for each in COMBINED)]
)
def test_two_shards(case: str) -> None:
    assert loss_runs.compare(case, 2) < ROUNDING


@pytest.mark.parametrize(
    "case",
    ["mask", "ignored class", "sum with mask", "global", "global towers", "global with mask and weights"],
)
def test_three_shards_without_a_graph(case: str) -> None:
    assert loss_runs.compare(case, 3, run_eagerly=True) < ROUNDING


def differences(backend: str, folder: Path, *cases: str, **environment: str) -> dict[str, Any]:
    script = script_for(backend, Path(loss_runs.__file__))
    process = subprocess.Popen(
        [sys.executable, *script, *cases],
        env={**os.environ, "KERAS_BACKEND": backend, "INSITU_HOME": str(folder / "home"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    results: dict[str, Any] = result_of(process)
    return results


def wrong(results: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in results.items() if not (isinstance(value, float) and value < ROUNDING)
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.torch)])
def test_devices_of_one_process(backend: str, tmp_path: Path) -> None:
    assert not wrong(differences(backend, tmp_path, *FEW, *GLOBAL, DEVICES="3"))


@pytest.mark.long
def test_jax(tmp_path: Path) -> None:
    """`test_everything` has the others."""
    cases = ("mask", "one number with weights", "global towers", "one of several outputs global")
    assert not wrong(differences("jax", tmp_path, *cases))


@pytest.mark.torch
def test_torch(tmp_path: Path) -> None:
    assert not wrong(differences("torch", tmp_path, *FEW, *GLOBAL))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.torch)])
def test_everything(backend: str, tmp_path: Path) -> None:
    assert not wrong(differences(backend, tmp_path))


class Counting:
    """A replica whose rows are what its loss divides by."""

    def __init__(self) -> None:
        self.totals: Any = None
        self.calls = 0

    def needs_totals(self, *, training: bool) -> bool:
        return self.totals is not None

    def find_out(self, *, training: bool) -> None:
        raise NeedsTotals

    def count_losses(self, shard: int, data: Any, *, training: bool) -> Any:
        rows = np.zeros((1, 2)) if data is None else np.stack([data, data], 1)
        return LossCounts(np.zeros(1) if data is None else np.array([data.sum()]), [rows])

    def set_totals(self, batch: Any, *, training: bool) -> None:
        self.totals, (self.rows,), self.starts = batch

    def compute(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("rows", [(0, 0), (2, 3)])
def test_totals_are_of_all_shards(rows: tuple[int, int]) -> None:
    replica = Counting()

    def compute() -> None:
        replica.compute()
        if replica.totals is None and any(rows):
            raise NeedsTotals

    parts = [ShardBatch(s, n, np.full(n, 2.0) if n else None) for s, n in enumerate(rows)]
    with insitu.exchange.join(0, ["127.0.0.1:1"], shards=(0, 1), num_shards=2) as group:
        _check(group, replica, parts, compute)
    assert replica.totals.tolist() == [sum(rows), 2.0 * sum(rows)]
    assert replica.rows.tolist() == [[2.0, 2.0]] * sum(rows)
    assert replica.starts.tolist() == [0, rows[0]]
    assert replica.calls == 3


def _check(group: Group, replica: Any, parts: list[ShardBatch], compute: Any) -> None:
    for _ in range(2):  # in the first step a replica finds out
        with_totals(replica, parts, group, compute, training=True)
