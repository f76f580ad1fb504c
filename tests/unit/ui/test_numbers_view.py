"""Curves and accounts of time as charts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

pytest.importorskip("markupsafe")

from insitu.cluster import CurvePoint
from insitu.ui.numbers_view import draw_comparison, draw_curves, draw_goodput, draw_tasks


def point(call: int, updates: int, **metrics: float) -> CurvePoint:
    return CurvePoint(call, updates, 0.0, 0, updates, metrics)


def test_a_metric_has_one_chart_with_its_validation_and_the_evaluator() -> None:
    curve = [point(0, 9, loss=9.0), point(1, 1, loss=2.0), point(1, 2, loss=1.0, val_loss=1.5)]
    found = [{"iterations": None, "metrics": {"accuracy": 0.5}}, {"iterations": 2, "metrics": {"loss": 1.25}}]
    loss, accuracy = map(str, draw_curves(curve, found))
    assert "training: 1, validation: 1.5, evaluator: 1.25" in loss and "accuracy" in accuracy
    assert loss.count("<polyline") == 1 and loss.count("<circle") == 2
    assert draw_curves([], []) == []


GOODPUT = {
    "wall": 10.0,
    "seconds": {"queueing": 0.0, "compile": 2.5, "gradient": 7.5},
    "other_tasks": [],
    "tasks": [
        {
            "task": "worker:0",
            "segments": [
                {"start": float(i), "end": i + 1.0, "seconds": {"compile" if i < 2 else "gradient": 1.0}}
                for i in range(10)
            ],
        },
        {"task": "worker:1", "segments": []},
    ],
}


def test_jobs_are_compared_over_updates_or_over_time() -> None:
    curve = [CurvePoint(0, 3, 15.0, 0, 3, {"loss": 2.0}), CurvePoint(0, 9, 40.0, 0, 9, {"loss": 1.0})]
    curves = {"a-1": (10.0, curve), "b-2": (0.0, [point(0, 5, loss=3.0, accuracy=0.5)]), "c-3": (0.0, [])}
    loss, accuracy = map(str, draw_comparison(curves, "updates"))
    assert "a-1: 1, b-2: 3" in loss and "b-2: 0.5" in accuracy and "c-3" not in loss
    over_time = str(draw_comparison({"a-1": curves["a-1"]}, "seconds")[0])
    assert "loss over seconds" in over_time and "<polyline" in over_time


def widths(drawn: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)"', drawn)]


def test_the_bar_of_a_job_has_a_piece_for_each_activity() -> None:
    drawn = str(draw_goodput(GOODPUT))
    ET.fromstring(drawn)
    compile_width, gradient_width = widths(drawn)
    assert gradient_width == pytest.approx(3 * compile_width) and "75%" in drawn


def test_a_task_has_a_piece_for_what_it_did_most_in_each_stretch() -> None:
    drawn = str(draw_tasks(GOODPUT))
    ET.fromstring(drawn)
    first, second = widths(drawn)
    assert second == pytest.approx(4 * first) and "worker:1" in drawn
