"""Shows values of rows: arrays that have the shape of a picture as PNG, others as text. Pure."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

_SMALLEST, _LARGEST = 4, 512
"""Pixels of a side."""
_TEXT = 200


def find_picture_shape(shape: Sequence[int], dtype: str) -> tuple[int, int, int] | None:
    """Return (height, width, channels) if a value of this shape is shown as a picture, else None.

    Vectors of bytes whose length is a square are taken for pictures, too, as those of Quick, Draw!.
    """
    height, width, channels = 0, 0, 1
    if len(shape) == 1 and dtype == "uint8":
        height = width = math.isqrt(shape[0])
        if height * width != shape[0]:
            return None
    elif len(shape) == 2:
        height, width = shape
    elif len(shape) == 3 and shape[2] in (1, 3):
        height, width, channels = shape
    if dtype == "str" or not (_SMALLEST <= height <= _LARGEST and _SMALLEST <= width <= _LARGEST):
        return None
    return height, width, channels


def flatten(value: Any) -> list[float]:
    """Return the numbers of nested lists, in order."""
    if isinstance(value, list):
        return [number for part in value for number in flatten(part)]
    return [float(value)]


def encode_picture(value: Any, shape: tuple[int, int, int], dtype: str) -> str | None:
    """Return a picture as a data URL; None if the numbers don't fit. Bytes are brightness; in other numbers
    the smallest is black, the largest white."""
    height, width, channels = shape
    numbers = flatten(value)
    if len(numbers) != height * width * channels:
        return None
    if dtype != "uint8":
        finite = [n for n in numbers if math.isfinite(n)] or [0.0]
        low, span = min(finite), (max(finite) - min(finite)) or 1.0
        numbers = [(n - low) / span * 255 if math.isfinite(n) else 0.0 for n in numbers]
    pixels = bytes(max(0, min(255, int(n))) for n in numbers)
    row = width * channels
    lines = b"".join(b"\0" + pixels[i * row : (i + 1) * row] for i in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines))
    png += _chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def show_value(value: Any) -> str:
    """Return a value as short text."""
    if value is None:
        return "too large to show"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


def show_rows(columns: Sequence[dict[str, Any]], preview: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the rows of a preview as cells: `{"column", "picture", "text"}`."""
    labels = preview["labels"]
    shown = []
    for row in preview["rows"]:
        cells = []
        for column in columns:
            value, name = row[column["name"]], column["name"]
            shape = find_picture_shape(column["shape"], column["dtype"])
            picture = encode_picture(value, shape, column["dtype"]) if shape and value is not None else None
            text = show_value(value)
            if name == "label" and isinstance(value, int) and 0 <= value < len(labels):
                text = f"{value} {labels[value]}"
            cells.append({"column": name, "picture": picture, "text": text})
        shown.append(cells)
    return shown
