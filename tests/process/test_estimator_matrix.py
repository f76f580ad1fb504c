"""`train_and_evaluate` under each strategy, with chief, worker, ps and evaluator killed once each.

It ends with all steps, its last checkpoint is scored, and where a strategy is deterministic the weights have
the bits, and the ledger the rows, of a job without failures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from estimator_jobs import MAX_STEPS, QUICK, ROWS_OF_MATRIX, Outcome, Row, run


def check_end(row: Row, outcome: Outcome) -> None:
    """Assert that a job has ended as it is to end."""
    assert outcome.job["state"] == "finished" and outcome.job["exit_code"] == 0
    bits = {worker["bits"] for worker in outcome.workers}
    (steps,) = {worker["step"] for worker in outcome.workers}
    assert len(bits) == 1
    if row.has_bits or row.name == "hybrid":
        assert steps == MAX_STEPS
    else:
        # Others may have a gradient under way when one reads the last number.
        assert MAX_STEPS <= steps < MAX_STEPS + len(outcome.workers)
    scored = [evaluation["iterations"] for evaluation in outcome.job["evaluations"]]
    assert scored[-1] == steps and outcome.job["evaluations"][-1]["metrics"]["accuracy"] > 0.7
    names = [evaluation["checkpoint"] for evaluation in outcome.job["evaluations"]]
    assert len(set(names)) == len(names)


def check_kills(row: Row, outcome: Outcome) -> None:
    """Assert that each task was killed that was to be, and started again."""
    expected = {victim for *_, victim in row.kills}
    if "--evaluator" in row.options:
        expected.add("evaluator:0")
    assert outcome.killed == expected
    attempts = {task["task"]: task["attempt"] for task in outcome.job["task_list"]}
    assert all(attempts[task] > 1 for task in expected)


def rows_of(outcome: Outcome) -> Any:
    """Return the audit of each epoch."""
    return outcome.ledger["ledger"]


def compare(tmp_path: Path, row: Row, backend: str) -> None:
    killed = run(tmp_path / "killed", row, backend, kills=True)
    check_kills(row, killed)
    check_end(row, killed)
    if row.has_bits:
        whole = run(tmp_path / "whole", row, backend, kills=False)
        check_end(row, whole)
        assert killed.workers == whole.workers
        assert rows_of(killed) == rows_of(whole)
        assert killed.job["evaluations"][-1]["metrics"] == whole.job["evaluations"][-1]["metrics"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_parameter_servers_lose_chief_server_and_evaluator(tmp_path: Path) -> None:
    outcome = run(tmp_path / "killed", QUICK, "jax", kills=True)
    check_kills(QUICK, outcome)
    check_end(QUICK, outcome)


CELLS = [
    pytest.param(row, backend, id=f"{row.name}-{row.form}-{backend}")
    for row in ROWS_OF_MATRIX
    for backend in row.backends
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("row", "backend"), CELLS)
def test_a_task_of_each_role_is_killed_under_each_strategy(tmp_path: Path, row: Row, backend: str) -> None:
    compare(tmp_path, row, backend)
