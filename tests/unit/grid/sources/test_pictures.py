"""Images become the rows that Pillow and Keras make of them, or are named with what is wrong."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pytest
from image_files import encode, make_image, scale
from PIL import Image
from pyarrow import feather
from pyarrow import parquet as pq

from insitu.base.errors import DamagedImages, SizeNeeded, SourceError
from insitu.grid.sources import find_sources, open_all
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.pictures import (
    Undecodable,
    decode,
    decode_all,
    is_image,
    load_pillow,
    measure,
    suggest_shape,
    with_images,
)

SHAPES = [(12, 20, 3), (8, 8, 3), (24, 40, 1), (7, 9, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_rows_are_those_of_pillow(shape: tuple[int, int, int], mode: str) -> None:
    data = encode(make_image(mode=mode))
    np.testing.assert_array_equal(decode(data, shape), scale(Image.open(io.BytesIO(data)), shape))


@pytest.mark.parametrize(
    ("format", "mode"),
    [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("BMP", "RGB"), ("GIF", "P"), ("WEBP", "RGBA")],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_format_is_read_as_keras_reads_it(format: str, mode: str, shape: tuple[int, int, int]) -> None:
    data = encode(make_image(mode=mode), format)
    modes = {1: "grayscale", 3: "rgb", 4: "rgba"}
    expected = keras.utils.load_img(io.BytesIO(data), modes[shape[2]], shape[:2], "bilinear")
    found = decode(data, shape)
    np.testing.assert_array_equal(found, np.asarray(expected).reshape(shape))


def test_smaller_images_take_all_pixels_into_account_as_with_antialias() -> None:
    image = make_image(size=(64, 48))
    found = decode(encode(image), (12, 16, 3)).astype(float)
    pixels = np.asarray(image, np.float32)
    smooth = np.asarray(keras.ops.image.resize(pixels, (12, 16), "bilinear", antialias=True))
    assert np.abs(found - smooth).max() < 1.5
    assert np.abs(found - smooth).mean() < np.abs(found - np.asarray(image, float)[::4, ::4]).mean() / 10


def test_the_orientation_of_a_camera_is_not_applied_as_in_keras() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(make_image(), "JPEG", exif=exif)
    expected = np.asarray(keras.utils.load_img(io.BytesIO(data)))
    np.testing.assert_array_equal(decode(data, (12, 20, 3)), expected)


def test_16_bit_grey_keeps_its_upper_bits() -> None:
    image = make_image(mode="I;16")
    upper = (np.asarray(image) >> 8).astype(np.uint8)
    np.testing.assert_array_equal(decode(encode(image), (12, 20, 1))[..., 0], upper)
    np.testing.assert_array_equal(decode(encode(image), (12, 20, 3))[..., 2], upper)


def test_the_first_frame_of_an_animation_is_read() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, (4, 4, 3))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "BMP", "GIF", "WEBP"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_truncated_image_is_never_a_row(format: str, part: float) -> None:
    data = encode(make_image(size=(64, 48)), format)
    with pytest.raises(Undecodable, match=r"is truncated|is damaged|is no whole"):
        decode(data[: int(len(data) * part)], (12, 20, 3))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello", r"is no whole JPEG, PNG, BMP, GIF or WEBP image: it begins with b'hello'"),
        (encode(make_image(mode="L"), "TIFF"), "is no whole JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no whole JPEG"),
    ],
)
def test_what_is_no_image_says_so(data: bytes, message: str) -> None:
    with pytest.raises(Undecodable, match=message):
        decode(data, (4, 4, 3))
    assert measure(io.BytesIO(data)) is None


def test_an_image_of_too_many_pixels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(Undecodable, match=r"is too large: Image size \(240 pixels\)"):
        decode(encode(make_image()), (4, 4, 3))


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SourceError, match=r"pip install 'insitu\[images\]'"):
        load_pillow()
    with pytest.raises(SourceError, match=r"pip install 'insitu\[images\]'"):
        decode(b"", (4, 4, 3))


def test_the_most_common_size_is_suggested() -> None:
    images = [make_image(size=size, mode="L") for size in ((20, 12), (30, 12), (30, 12))]
    found = [measure(io.BytesIO(encode(image))) for image in images]
    assert found[0] == (12, 20, True) and suggest_shape([*found, None]) == (12, 30, 1)
    assert suggest_shape([*found, (12, 30, False)]) == (12, 30, 3)
    assert suggest_shape([None]) is None


def test_all_images_are_decoded_in_their_order_by_threads() -> None:
    data = [encode(make_image(seed)) for seed in range(100)]
    data[3], data[70] = b"", data[70][:90]
    rows, problems = decode_all(data, (12, 20, 3))
    assert list(problems) == [3, 70] and not rows[3].any()
    for number in (0, 2, 4, 50, 99):
        np.testing.assert_array_equal(rows[number], np.asarray(make_image(number)))


def make_batch(images: list[bytes | None]) -> pa.RecordBatch:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [{"bytes": data, "path": f"{i}.png"} for i, data in enumerate(images)]
    return pa.record_batch({"id": pa.array(range(len(images))), "image": pa.array(values, kind)})


def test_structs_of_images_become_tensors() -> None:
    data = [encode(make_image(seed)) for seed in range(3)]
    batch = with_images(make_batch(data), (6, 5, 3), Path("a.parquet"))
    assert batch.schema.names == ["id", "image"] and batch.column(1).type.shape == [6, 5, 3]
    np.testing.assert_array_equal(batch.column(1).to_numpy_ndarray()[2], scale(make_image(2), (6, 5, 3)))
    plain = pa.record_batch({"x": pa.array([{"bytes": 1, "path": "a"}]), "y": pa.array([b"1"])})
    assert with_images(plain, (6, 5, 3), Path("a.parquet")) is plain
    assert not is_image(pa.struct([("bytes", pa.binary())])) and not is_image(pa.binary())


def test_structs_of_images_that_cannot_be_decoded_are_named() -> None:
    data = encode(make_image())
    with pytest.raises(SizeNeeded, match=r"a\.parquet, whose column 'image' holds .* most often of 12x20"):
        with_images(make_batch([data]), None, Path("a.parquet"))
    with pytest.raises(
        DamagedImages, match=r"2 damaged: a\.parquet: the image in column 'image' of row 11 is"
    ):
        with_images(make_batch([data, b"x", b""]), (6, 5, 3), Path("a.parquet"), 10)
    with pytest.raises(SourceError, match=r"the path 1\.png alone in column 'image' of row 1\."):
        with_images(make_batch([data, None]), (6, 5, 3), Path("a.parquet"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_size_of_images_is_refused_for_a_table_without_images(tmp_path: Path, name: str) -> None:
    table = pa.table({"picture": [encode(make_image(0))], "label": [1]})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        feather.write_feather(table, tmp_path / name)
    with pytest.raises(SourceError, match=r"--images decodes .* Received: .* picture of type binary, label"):
        open_all(find_sources([str(tmp_path / name)], None), SourceOptions(images=(6, 5, 3)))
