"""Images of drawings that are given as strokes, as in the Quick, Draw! data set. Pure.

The geometry is that of the data set's own bitmaps: a drawing is in a square of 256, is centred by its largest
coordinates, and gets a margin; lines are 16 wide with round ends. A pixel's value is how much of it a line
covers, as far as its distance from the line's middle says. So values differ a little from those bitmaps at
the edges of lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SIDE = 256.0
_LINE, _MARGIN = 16.0, 16.0
_PIECE_PIXELS = 2.0
"""Pixels of a line whose surroundings are looked at together."""
_MOST_PIXELS = 8 << 20
"""Pixels that are looked at in one call of NumPy."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Strokes:
    """The points of drawings, in the order of drawings, strokes and points."""

    #: Coordinates from the left: float64[points].
    x: Floats
    #: Coordinates from the top: float64[points].
    y: Floats
    #: The first point of each stroke, and the end of the last one: int64[strokes + 1].
    points: Ints
    #: The first stroke of each drawing, and the end of the last one: int64[drawings + 1].
    strokes: Ints


def render(drawings: Strokes, side: int) -> npt.NDArray[np.uint8]:
    """Return an image of each drawing, uint8[drawings, side, side]: 255 where a line is, 0 elsewhere."""
    count = len(drawings.strokes) - 1
    images = np.zeros((count, side * side), np.float32)
    of_stroke = np.repeat(np.arange(count), np.diff(drawings.strokes))
    of_point = np.repeat(of_stroke, np.diff(drawings.points))
    x, y = _place(drawings.x, of_point, count, side), _place(drawings.y, of_point, count, side)
    first, last = _segments(drawings.points)
    pieces = _cut(x[first], y[first], x[last], y[last])
    owners = of_point[first][pieces[0]]
    radius = _LINE / 2 * side / (_SIDE + 2 * _MARGIN + _LINE)
    window = int(np.ceil(_PIECE_PIXELS + 2 * (radius + 0.5))) + 1
    step = max(1, _MOST_PIXELS // window**2)
    for start in range(0, len(owners), step):
        part = slice(start, start + step)
        _draw(images, owners[part], [ends[part] for ends in pieces[1:]], radius, window, side)
    return np.rint(images * 255).astype(np.uint8).reshape(count, side, side)


def _place(values: Floats, of_point: Ints, count: int, side: int) -> Floats:
    """Return coordinates in pixels, each drawing centred in its image."""
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, of_point, values)
    np.maximum.at(high, of_point, values)
    total = 2 * _MARGIN + _LINE
    shift = (_SIDE - high) / 2 + total / 2
    return (values + shift[of_point]) * (side / (_SIDE + total))


def fit_square(drawings: Strokes) -> Strokes:
    """Return drawings with coordinates in [0, 255]: those with others are moved and scaled as a whole.

    The data set's simplified drawings were made in this way, and stay as they are.
    """
    count = len(drawings.strokes) - 1
    of_stroke = np.repeat(np.arange(count), np.diff(drawings.strokes))
    of_point = np.repeat(of_stroke, np.diff(drawings.points))
    bounds = []
    for values in (drawings.x, drawings.y):
        low, high = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(low, of_point, values)
        np.maximum.at(high, of_point, values)
        bounds.append((low, high))
    (left, right), (top, bottom) = bounds
    outside = (np.minimum(left, top) < 0) | (np.maximum(right, bottom) > _SIDE - 1)
    extent = np.maximum(right - left, bottom - top)
    scale = np.where(outside & (extent > 0), (_SIDE - 1) / np.where(extent > 0, extent, 1), 1.0)
    left, top = np.where(outside, left, 0), np.where(outside, top, 0)
    x = (drawings.x - left[of_point]) * scale[of_point]
    y = (drawings.y - top[of_point]) * scale[of_point]
    return Strokes(x, y, drawings.points, drawings.strokes)


def _segments(points: Ints) -> tuple[Ints, Ints]:
    """Return the points at which the lines of all strokes begin and end. A single point is a line, too."""
    numbers = np.arange(points[-1])
    ends = np.zeros(len(numbers), bool)
    lengths = np.diff(points)
    ends[points[1:][lengths > 0] - 1] = True
    single = points[:-1][lengths == 1]
    first = np.concatenate((numbers[~ends], single))
    last = np.concatenate((numbers[~ends] + 1, single))
    order = np.argsort(first, kind="stable")
    return first[order], last[order]


def _cut(x0: Floats, y0: Floats, x1: Floats, y1: Floats) -> tuple[Ints, Floats, Floats, Floats, Floats]:
    """Return (number of the line, its ends) of pieces of lines, none longer than _PIECE_PIXELS."""
    counts = np.maximum(1, np.ceil(np.hypot(x1 - x0, y1 - y0) / _PIECE_PIXELS)).astype(np.int64)
    lines = np.repeat(np.arange(len(x0)), counts)
    number = np.arange(len(lines)) - np.repeat(np.cumsum(counts) - counts, counts)
    start, stop = number / counts[lines], (number + 1) / counts[lines]
    dx, dy = (x1 - x0)[lines], (y1 - y0)[lines]
    x, y = x0[lines], y0[lines]
    return lines, x + dx * start, y + dy * start, x + dx * stop, y + dy * stop


def _draw(
    images: npt.NDArray[np.float32], owners: Ints, ends: list[Floats], radius: float, window: int, side: int
) -> None:
    """Draw pieces of lines into the images of their drawings."""
    x0, y0, x1, y1 = (end.astype(np.float32)[:, None, None] for end in ends)
    reach = np.float32(radius + 0.5)
    offsets = np.arange(window)
    columns = np.floor(np.minimum(x0, x1) - reach).astype(np.int64) + offsets[None, None, :]
    rows = np.floor(np.minimum(y0, y1) - reach).astype(np.int64) + offsets[None, :, None]
    # Pixel p covers [p, p + 1): its middle is compared with the line's.
    px, py = columns.astype(np.float32) + np.float32(0.5), rows.astype(np.float32) + np.float32(0.5)
    dx, dy = x1 - x0, y1 - y0
    squared = dx * dx + dy * dy
    along = ((px - x0) * dx + (py - y0) * dy) / np.where(squared > 0, squared, np.float32(1))
    along = np.clip(along, 0, 1)
    distance = np.hypot(px - (x0 + along * dx), py - (y0 + along * dy))
    covered = np.clip(reach - distance, 0, 1)
    seen = (covered > 0) & (columns >= 0) & (columns < side) & (rows >= 0) & (rows < side)
    pixels = (owners[:, None, None] * side + rows) * side + columns
    np.maximum.at(images.reshape(-1), pixels[seen], covered[seen])
