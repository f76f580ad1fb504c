"""Charts and their scales."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("markupsafe")

from insitu.ui.charts import Series, choose_ticks, draw_chart, thin_out

NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)


@given(NUMBERS, NUMBERS)
def test_ticks_enclose_what_is_drawn_and_are_few(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = choose_ticks(low, high)
    room = (ticks[1] - ticks[0]) * 1e-6
    assert ticks[0] <= low + room and ticks[-1] >= high - room
    assert 2 <= len(ticks) <= 12 and ticks == sorted(ticks)


@given(st.lists(st.tuples(st.integers(0, 10**6).map(float), st.floats()), max_size=30), st.text(max_size=20))
def test_any_numbers_and_names_make_a_chart_that_can_be_read(
    points: list[tuple[float, float]], name: str
) -> None:
    drawn = str(draw_chart("loss", [Series(name, sorted(points, key=lambda p: p[0]))], "updates"))
    finite = [p for p in points if math.isfinite(p[1]) and abs(p[1]) < 1e300]
    readable = all(c.isprintable() for c in name)
    if finite and len(finite) == len(points) and readable:
        ET.fromstring(drawn)
        assert "nan" not in drawn.replace(name, "")


def test_names_are_text() -> None:
    drawn = str(draw_chart("<b>", [Series('"><script>', [(0.0, 1.0), (1.0, 2.0)])], "<i>"))
    assert "<script>" not in drawn and "<b>" not in drawn.replace("<b>2", "") and "<i>" not in drawn


@pytest.mark.parametrize("values", [(1.2e308, -1.2e308), (1.0, 1.0 + 2**-52), (5e-324, 0.0), (1e299, -1e299)])
def test_extreme_numbers_are_drawn_or_left_out(values: tuple[float, float]) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    assert "nan" not in str(draw_chart("loss", [Series("a", points)], "updates"))


def test_gaps_interrupt_the_line_and_a_single_point_is_a_dot() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 1.0)]
    drawn = str(draw_chart("loss", [Series("a", points)], "updates"))
    assert drawn.count("<polyline") == 1 and drawn.count("<circle") == 1
    assert "nothing to draw" in str(draw_chart("loss", [Series("a", [(0.0, math.inf)])], "updates"))


def test_thinning_keeps_peaks() -> None:
    points = [(float(i), 100.0 if i == 5000 else 0.0) for i in range(10_000)]
    thin = thin_out(points, 100)
    assert len(thin) <= 102 and max(y for _, y in thin) == 100.0
