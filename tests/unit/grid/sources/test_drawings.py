from __future__ import annotations

import numpy as np
import pytest

from insitu.grid.sources.drawings import Strokes, fit_square, render


def strokes(*drawings: list[list[list[float]]]) -> Strokes:
    """Drawings as the data set has them: a list of strokes, each of its x and its y coordinates."""
    flat = [stroke for drawing in drawings for stroke in drawing]
    return Strokes(
        np.array([x for stroke in flat for x in stroke[0]], float),
        np.array([y for stroke in flat for y in stroke[1]], float),
        np.cumsum([0, *(len(stroke[0]) for stroke in flat)]),
        np.cumsum([0, *(len(drawing) for drawing in drawings)]),
    )


def covered_exactly(drawing: Strokes, side: int) -> np.ndarray:
    """The image by the definition: the distance of each pixel's middle from each line."""
    scale = side / 304
    x = (drawing.x + (256 - drawing.x.max()) / 2 + 24) * scale
    y = (drawing.y + (256 - drawing.y.max()) / 2 + 24) * scale
    centres = np.arange(side) + 0.5
    best = np.full((side, side), np.inf)
    for start, stop in zip(drawing.points[:-1], drawing.points[1:], strict=True):
        for a in range(start, max(start + 1, stop - 1)):
            b = min(a + 1, stop - 1)
            dx, dy = x[b] - x[a], y[b] - y[a]
            along = (centres[None, :] - x[a]) * dx + (centres[:, None] - y[a]) * dy
            along = np.clip(along / max(dx * dx + dy * dy, 1e-30), 0, 1)
            distance = np.hypot(centres[None, :] - x[a] - along * dx, centres[:, None] - y[a] - along * dy)
            best = np.minimum(best, distance)
    return np.rint(np.clip(8 * scale + 0.5 - best, 0, 1) * 255)


@pytest.mark.parametrize("side", [8, 28, 64])
def test_images_are_those_of_the_definition(side: int):
    rng = np.random.default_rng(1)
    drawings = [
        [[rng.integers(0, 256, n).tolist(), rng.integers(0, 256, n).tolist()] for n in (7, 1, 2)]
        for _ in range(5)
    ]
    images = render(strokes(*drawings), side)
    assert images.shape == (5, side, side) and images.dtype == np.uint8
    for image, drawing in zip(images, drawings, strict=True):
        difference = np.abs(image.astype(int) - covered_exactly(strokes(drawing), side))
        assert difference.max() <= 1


def test_a_line_lies_in_the_middle():
    (image,) = render(strokes([[[0, 255], [128, 128]]]), 28)
    # Its largest y is centred: the line is 192 of 256 down, as in the data set's bitmaps.
    assert image.sum(axis=1).argmax() in (18, 19, 20) and image.max() > 200
    assert image[:15].sum() == 0 and image[:, 0].sum() == 0


def test_drawings_without_strokes_or_points_are_empty():
    images = render(strokes([], [[[], []]], [[[3], [3]]]), 28)
    assert images[:2].sum() == 0 and images[2].sum() > 0


def test_coordinates_are_brought_into_the_square():
    small, large = [[[0, 10], [0, 255]]], [[[-100, 900.5], [50, 150]]]
    fitted = fit_square(strokes(small, large))
    assert fitted.x[:2].tolist() == [0, 10] and fitted.y[:2].tolist() == [0, 255]
    np.testing.assert_allclose(fitted.x[2:], [0, 255])
    np.testing.assert_allclose(fitted.y[2:], [0, 255 * 100 / 1000.5])
    assert render(fit_square(strokes([[[5000], [5000]]])), 8).shape == (1, 8, 8)
