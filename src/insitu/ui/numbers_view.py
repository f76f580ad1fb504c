"""Curves of a job, and how its time was spent, as charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from markupsafe import Markup

from insitu.base.errors import InsituError
from insitu.base.paths import JobPaths
from insitu.cluster import CurvePoint, measure_goodput, read_curve
from insitu.service import format_duration
from insitu.ui.charts import Series, draw_bar, draw_chart, draw_rows

_VALIDATION = "val_"
_PIECES = 80
"""Pieces that are drawn of the time of one task."""


def read_curve_points(job: JobPaths) -> list[dict[str, Any]]:
    """Return the curve of a job in the form of docs/reference/json.md."""
    return [asdict(point) for point in read_curve(job)]


def read_numbers(job: JobPaths, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the charts of a job: its curves, and how its time was spent (None if unknown). Reads files."""
    try:
        goodput = measure_goodput(job).to_json()
    except InsituError:  # a job whose folder is being removed
        goodput = None
    return {
        "charts": draw_curves(read_curve(job), evaluations),
        "goodput": goodput,
        "bar": draw_goodput(goodput) if goodput else "",
        "rows": draw_tasks(goodput) if goodput else "",
    }


def draw_curves(curve: Sequence[CurvePoint], evaluations: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return a chart for each metric over updates, with its validation and the evaluator's results. The last
    call of `fit` is drawn."""
    last = max((point.call for point in curve), default=0)
    charts: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in curve:
        if point.call == last:
            for name, value in point.metrics.items():
                metric, line = name.removeprefix(_VALIDATION), "training"
                if metric != name:
                    line = "validation"
                charts.setdefault(metric, {}).setdefault(line, []).append((float(point.updates), value))
    for index, evaluation in enumerate(evaluations):
        x = evaluation["iterations"] if evaluation["iterations"] is not None else index + 1
        for name, value in evaluation["metrics"].items():
            charts.setdefault(name, {}).setdefault("evaluator", []).append((float(x), float(value)))
    return [
        draw_chart(metric, [Series(line, points) for line, points in lines.items()], "updates")
        for metric, lines in charts.items()
    ]


def draw_comparison(
    curves: Mapping[str, tuple[float, Sequence[CurvePoint]]], over: Literal["updates", "seconds"]
) -> list[Markup]:
    """Return a chart for each metric, with a line for each job: `curves` has when it was created, and its
    curve. The last call of `fit` is drawn."""
    charts: dict[str, list[Series]] = {}
    for job, (created, curve) in curves.items():
        last = max((point.call for point in curve), default=0)
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in curve:
            if point.call == last:
                x = float(point.updates) if over == "updates" else point.at - created
                for name, value in point.metrics.items():
                    lines.setdefault(name, []).append((x, value))
        for name, points in lines.items():
            charts.setdefault(name, []).append(Series(job, points))
    return [draw_chart(name, series, over) for name, series in charts.items()]


def draw_goodput(goodput: Mapping[str, Any]) -> Markup:
    """Return one bar for the job: its seconds by activity."""
    parts = [(name, seconds) for name, seconds in goodput["seconds"].items() if seconds > 0]
    return draw_bar("Where the time of the job went", parts, _format_seconds)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def draw_tasks(goodput: Mapping[str, Any]) -> Markup:
    """Return a row for each task over time: what it did most in each stretch."""
    rows = []
    for task in (*goodput["tasks"], *goodput["other_tasks"]):
        pieces: list[tuple[float, float, str]] = []
        segments = task["segments"]
        size = -(-len(segments) // _PIECES) or 1
        for first in range(0, len(segments), size):
            part = segments[first : first + size]
            total: dict[str, float] = {}
            for segment in part:
                for name, seconds in segment["seconds"].items():
                    total[name] = total.get(name, 0.0) + seconds
            most = max(total, key=lambda name: total[name], default="idle")
            if pieces and pieces[-1][2] == most:
                pieces[-1] = (pieces[-1][0], part[-1]["end"], most)
            else:
                pieces.append((part[0]["start"], part[-1]["end"], most))
        rows.append((task["task"], pieces))
    return draw_rows("What each task did, over time", rows, goodput["wall"])
