"""Draws charts as SVG on the server, so that the page needs no script for them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 36
_MOST = 400
"""Points that are drawn of one series; a screen shows no more."""
_LARGEST = 1e300
"""No line can be drawn of a loss that has diverged so far."""
_NARROW = 1e-9
"""Values that differ by less, as a share of themselves, are drawn as equal ones."""
COLOURS = 8
"""Classes `line-0` to `line-7` of the style sheet."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    #: Its name in the legend.
    name: str
    #: (x, y), sorted by x. Values that aren't finite interrupt the line.
    points: Sequence[tuple[float, float]]


def draw_chart(title: str, series: Sequence[Series], x_label: str) -> Markup:
    """Return a chart of all series as a figure with a legend. Its text says the last value of each."""
    drawn = [s for s in series if any(_is_finite(p) for p in s.points)]
    if not drawn:
        return Markup('<p class="quiet">{}: nothing to draw yet.</p>').format(title)
    finite = [p for s in drawn for p in s.points if _is_finite(p)]
    x_ticks = choose_ticks(min(x for x, _ in finite), max(x for x, _ in finite))
    y_ticks = choose_ticks(min(y for _, y in finite), max(y for _, y in finite))
    parts = [_draw_axes(x_ticks, y_ticks, x_label)]
    for index, each in enumerate(drawn):
        parts.append(_draw_line(each, index % COLOURS, (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])))
    last = {s.name: next(y for _, y in reversed(s.points) if abs(y) < _LARGEST) for s in drawn}
    spoken = f"{title} over {x_label}. " + ", ".join(f"{name}: {value:.4g}" for name, value in last.items())
    legend = Markup("").join(
        Markup('<li><span class="swatch swatch-{}"></span>{} <b>{}</b></li>').format(
            index % COLOURS, name, f"{value:.4g}"
        )
        for index, (name, value) in enumerate(last.items())
    )
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><svg viewBox="0 0 {} {}" role="img" '
        'aria-label="{}">{}</svg><ul class="legend">{}</ul></figure>'
    ).format(title, _WIDTH, _HEIGHT, spoken, Markup("").join(parts), legend)


def choose_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that enclose [low, high], about `count` of them, at least two."""
    if high - low <= max(abs(low), abs(high)) * _NARROW:
        room = abs(low) / 2 or 0.5
        low, high = low - room, high + room
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    step = next(f * magnitude for f in (1.0, 2.0, 2.5, 5.0, 10.0) if f * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def thin_out(points: Sequence[tuple[float, float]], most: int = _MOST) -> list[tuple[float, float]]:
    """Return `most` points at most: of each stretch the smallest and the largest value. Peaks stay."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {
            min(range(len(part)), key=lambda i: part[i][1]),
            max(range(len(part)), key=lambda i: part[i][1]),
        }
        kept += [part[i] for i in sorted(ends)]
    return kept


def _is_finite(point: tuple[float, float]) -> bool:
    return all(abs(value) < _LARGEST for value in point)


def _place(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (value - low) / (high - low) * (end - start)


def _draw_axes(x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> Markup:
    parts = []
    for tick in y_ticks:
        y = _place(tick, y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                _LEFT, _WIDTH - _RIGHT, y, y
            )
        )
        parts.append(
            Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                _LEFT - 6, y + 4, _format_tick(tick)
            )
        )
    for index, tick in enumerate(x_ticks):
        x = _place(tick, x_ticks[0], x_ticks[-1], _LEFT, _WIDTH - _RIGHT)
        anchor = "end" if index == len(x_ticks) - 1 else "middle"
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="{}">{}</text>').format(
                x, _HEIGHT - 20, anchor, _format_tick(tick)
            )
        )
    parts.append(
        Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, x_label
        )
    )
    return Markup("").join(parts)


def _format_tick(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _draw_line(
    series: Series, colour: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> Markup:
    """Return the line of a series, cut if a value isn't finite. A single point is a dot."""
    parts: list[Markup] = []
    for stretch in _split_at_gaps(series.points):
        places = [
            (
                _place(x, *x_range, _LEFT, _WIDTH - _RIGHT),
                _place(y, *y_range, _HEIGHT - _BOTTOM, _TOP),
            )
            for x, y in thin_out(stretch)
        ]
        if len(places) == 1:
            parts.append(
                Markup('<circle class="dot-{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(colour, *places[0])
            )
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(Markup('<polyline class="line line-{}" points="{}"/>').format(colour, path))
    return Markup("<g><title>{}</title>{}</g>").format(escape(series.name), Markup("").join(parts))


def _split_at_gaps(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    stretches: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if _is_finite(point):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def draw_bar(
    title: str, parts: Sequence[tuple[str, float]], format_seconds: Callable[[float], str]
) -> Markup:
    """Return one bar of parts, each as long as its seconds, with a legend. Colours are classes `act-NAME`."""
    total = sum(seconds for _, seconds in parts) or 1.0
    drawn, x = [], 0.0
    for name, seconds in parts:
        width = seconds / total * _WIDTH
        drawn.append(_draw_piece(x, width, 26, name, f"{name}: {seconds:.1f} s"))
        x += width
    legend = Markup("").join(
        Markup('<li><span class="swatch act-{}"></span>{} <b>{}</b> {}</li>').format(
            name, name, format_seconds(seconds), f"{seconds / total:.0%}"
        )
        for name, seconds in parts
    )
    spoken = f"{title}. " + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts)
    return Markup(
        '<figure class="chart"><figcaption>{}</figcaption><svg class="bars" viewBox="0 0 {} 26" role="img" '
        'aria-label="{}" preserveAspectRatio="none">{}</svg><ul class="legend">{}</ul></figure>'
    ).format(title, _WIDTH, spoken, Markup("").join(drawn), legend)


def draw_rows(
    title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str]]]], length: float
) -> Markup:
    """Return a row for each name, of pieces (start, end, what) in [0, length]."""
    shown = []
    for name, pieces in rows:
        scale = _WIDTH / length if length > 0 else 0.0
        drawn = [
            _draw_piece(start * scale, (end - start) * scale, 16, what, f"{what} from {start:.0f} s")
            for start, end, what in pieces
        ]
        shown.append(
            Markup(
                '<div class="lane"><span>{}</span><svg class="bars" viewBox="0 0 {} 16" '
                'preserveAspectRatio="none" role="img" aria-label="{}">{}</svg></div>'
            ).format(name, _WIDTH, f"{name} over time", Markup("").join(drawn))
        )
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}</figure>').format(
        title, Markup("").join(shown)
    )


def _draw_piece(x: float, width: float, height: int, name: str, title: str) -> Markup:
    return Markup(
        '<rect class="act-{}" x="{:.2f}" y="0" width="{:.2f}" height="{}"><title>{}</title></rect>'
    ).format(name, x, max(0.0, width), height, title)


def draw_histogram(histogram: Mapping[str, Sequence[float]], name: str) -> Markup:
    """Return a small histogram: how many values are in each of some ranges."""
    counts, edges = histogram["counts"], histogram["edges"]
    most, width = max(counts) or 1, 160 / len(counts)
    bars = Markup("").join(
        Markup(
            '<rect class="fill-0" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
            "<title>{}</title></rect>"
        ).format(
            index * width,
            36 - 36 * count / most,
            max(0.5, width - 0.6),
            36 * count / most,
            f"{edges[index]:.4g} to {edges[index + 1]:.4g}: {count:,}",
        )
        for index, count in enumerate(counts)
    )
    spoken = f"Values of {name}, from {edges[0]:.4g} to {edges[-1]:.4g}"
    return Markup('<svg class="histogram" viewBox="0 0 160 36" role="img" aria-label="{}">{}</svg>').format(
        spoken, bars
    )
