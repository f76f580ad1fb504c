"""docs/reference/strategies.md says what was recorded, of everything that there is."""

from __future__ import annotations

import matrix

import insitu


def test_the_page_is_what_the_recorded_results_give():
    assert matrix.PAGE.read_text() == matrix.page(matrix.load())


def test_every_strategy_backend_and_way_has_a_cell():
    exported = {name for name in insitu.__all__ if name.endswith("Strategy") and name != "Strategy"}
    assert exported <= {row.strategy for row in matrix.ROWS}
    cells = {(c["strategy"], c["variant"], c["backend"], c["way"]) for c in matrix.load()}
    assert cells == {(row.strategy, row.variant, b, way) for row, b, way in matrix.all_cells()}


def test_a_cell_works_only_where_it_agrees():
    row = matrix.ROWS[0]
    good = {"losses": 1e-6, "weights": 0.0, "bits": False}
    assert matrix.cell_of(row, "jax", "fit", good)["status"] == matrix.WORKS
    for measured in (None, {"error": "boom"}, {**good, "weights": 1e-3}, {**good, "losses": float("nan")}):
        cell = matrix.cell_of(row, "jax", "fit", measured)
        assert cell["status"] == matrix.NOT_VERIFIED
        assert cell["why"]
