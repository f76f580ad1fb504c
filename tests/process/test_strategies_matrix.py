"""Cells of docs/reference/strategies.md, trained again: a few always, all of them when there is time."""

from __future__ import annotations

import json
from pathlib import Path

import matrix
import pytest

TORCH = pytest.param("torch", marks=pytest.mark.torch)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_ways_of_one_strategy_agree_with_plain_keras(tmp_path: Path):
    name = "OneDeviceStrategy"
    asked = json.dumps([[name, way] for way in matrix.WAYS])
    answer = matrix.answer_of(matrix.start("jax", "alone", asked, INSITU_HOME=str(tmp_path)))
    row = next(row for row in matrix.ROWS if row.name == name)
    for way in matrix.WAYS:
        cell = matrix.cell_of(row, "jax", way, answer.get(f"{name}/{way}", answer))
        assert cell["status"] == matrix.WORKS, cell


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", TORCH])
def test_the_cells_are_what_the_page_says(backend: str):
    recorded = {
        (c["strategy"], c["variant"], c["way"]): c["status"] for c in matrix.load() if c["backend"] == backend
    }
    worse = []
    for cell in matrix.run(backend):
        before = recorded[cell["strategy"], cell["variant"], cell["way"]]
        if before == matrix.WORKS and cell["status"] != matrix.WORKS:
            worse.append(cell)
    assert not worse
