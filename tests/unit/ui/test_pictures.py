"""Rows as pictures and text."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest

from insitu.ui.pictures import encode_picture, find_picture_shape, show_rows, show_value


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ([784], "uint8", (28, 28, 1)),
        ([784], "float32", None),
        ([783], "uint8", None),
        ([28, 28], "float32", (28, 28, 1)),
        ([32, 32, 3], "uint8", (32, 32, 3)),
        ([32, 32, 4], "uint8", None),
        ([2, 2], "uint8", None),
        ([5000, 5000], "uint8", None),
        ([], "str", None),
    ],
)
def test_what_is_a_picture(shape: list[int], dtype: str, expected: tuple[int, int, int] | None) -> None:
    assert find_picture_shape(shape, dtype) == expected


def test_a_picture_has_the_bytes_of_the_value() -> None:
    url = encode_picture([[0, 255, 7, 9], [1, 2, 3, 4], [0, 0, 0, 0], [9, 9, 9, 9]], (4, 4, 1), "uint8")
    assert url is not None
    png = base64.b64decode(url.partition(",")[2])
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (4, 4)
    start = png.index(b"IDAT") + 4
    assert zlib.decompress(png[start:-16]).startswith(b"\0\0\xff\x07\x09\0\x01\x02\x03\x04")


def test_other_numbers_are_scaled_and_a_wrong_count_is_no_picture() -> None:
    assert encode_picture([[-1.0, 1.0], [float("nan"), 0.0]], (2, 2, 1), "float32") is not None
    assert encode_picture([1, 2, 3], (2, 2, 1), "uint8") is None


def test_labels_have_their_names_and_text_is_cut() -> None:
    columns = [{"name": "x", "dtype": "str", "shape": []}, {"name": "label", "dtype": "int64", "shape": []}]
    preview = {"labels": ["cat"], "rows": [{"x": "<b>" + "a" * 300, "label": 0}, {"x": "", "label": 7}]}
    first, second = show_rows(columns, preview)
    assert first[1]["text"] == "0 cat" and second[1]["text"] == "7"
    assert len(first[0]["text"]) == 200 and show_value(None) == "too large to show"
