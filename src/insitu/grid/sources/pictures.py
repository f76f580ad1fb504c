"""Decodes images by Pillow into rows of one shape: folders of files, members of archives, columns of tables.

The whole image is scaled to HEIGHTxWIDTH by Pillow's bilinear filter, which takes all pixels into account
when it makes an image smaller. Modes become grey, RGB or RGBA as in `keras.utils.load_img`: transparency is
dropped for RGB, and the orientation that a camera notes (EXIF) isn't applied. 16-bit grey levels keep their
upper 8 bits, as Pillow reads those of colours.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import DamagedImages, SizeNeeded, SourceError
from insitu.grid.sources.parallel import map_ordered

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp")
"""How the names of images end."""
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
"""Pillow knows more formats, some of which start other programs."""
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels -> Pillow's name."""
_GREY = ("1", "L", "I;16", "I;16B", "I;16L", "I;16N")
_BATCH_BYTES, _MOST_BATCH = 1 << 20, 32
"""Bytes of rows, and images, that one thread decodes at a time."""
MOST_THREADS = 64
"""Threads that decode images: that takes so long that the rest of an import keeps pace with many."""
_SHOWN_BYTES = 8
_MOST_MEASURED = 1000
"""Images whose sizes are looked at to suggest one."""
_STRUCT = {"bytes", "path"}
"""Fields of an image in a column of Hugging Face datasets."""

Shape = tuple[int, int, int]
"""Height, width and channels of a row."""


class Undecodable(Exception):
    """An image that can't be decoded; says why, such as `is truncated`."""


def load_pillow() -> Any:
    """Return Pillow's module of images. Raises SourceError if it isn't installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise SourceError(
            f"Images are decoded by Pillow. Received: {error}. On each host that reads, install it: "
            f"pip install 'insitu[images]'"
        ) from None
    return Image


def decode(data: bytes, shape: Shape) -> npt.NDArray[np.uint8]:
    """Return the image that a file's bytes hold: uint8[height, width, channels], which can't be written.

    Raises Undecodable.
    """
    image = load_pillow()
    height, width, channels = shape
    try:
        with image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            found: Any = opened
            if opened.mode.startswith("I;16"):
                found = image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
            if found.mode in ("I", "F"):
                raise Undecodable(f"has pixels of 32 bits (mode {found.mode}), where 8 or 16 are read")
            if found.mode != _MODES[channels]:
                found.load()
                if channels != 4:  # Pillow would warn that it drops it
                    found.info.pop("transparency", None)
                found = found.convert(_MODES[channels])
            if found.size != (width, height):
                found = found.resize((width, height), image.Resampling.BILINEAR)
            # np.asarray would make the bytes several times, which takes the lock of the interpreter.
            return np.frombuffer(found.tobytes(), np.uint8).reshape(shape)
    except (Undecodable, MemoryError):
        raise
    except Exception as error:  # each decoder of Pillow has errors of its own
        raise Undecodable(_describe(data, error)) from error


def measure(file: IO[bytes]) -> tuple[int, int, bool] | None:
    """Return (height, width, whether it is grey) by an image's header; None if it can't be read."""
    try:
        with load_pillow().open(file, formats=_FORMATS) as opened:
            return opened.height, opened.width, opened.mode in _GREY
    except SourceError:
        raise
    except Exception:
        return None


def _describe(data: bytes, error: Exception) -> str:
    """Return what is wrong with an image's bytes, behind its name."""
    if not data:
        return "is empty"
    said = " ".join(str(error).split())[:200]
    if type(error).__name__ == "UnidentifiedImageError":
        kinds = f"{', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        return f"is no whole {kinds} image: it begins with {data[:_SHOWN_BYTES]!r}"
    if type(error).__name__ == "DecompressionBombError":
        return f"is too large: {said}"
    is_cut = isinstance(error, EOFError) or "truncated" in said.lower() or "unexpected end" in said.lower()
    return f"is {'truncated' if is_cut else 'damaged'} ({said or type(error).__name__})"


def suggest_shape(found: Iterable[tuple[int, int, bool] | None]) -> Shape | None:
    """Return the most common height and width of what `measure` returns, with 1 channel if all are grey, else
    3. None if no image can be read."""
    known = [each for each in found if each is not None]
    if not known:
        return None
    ((height, width), _), *_ = Counter((height, width) for height, width, _ in known).most_common(1)
    return height, width, 1 if all(grey for *_, grey in known) else 3


def batch_size(shape: Shape) -> int:
    """Return how many images of a shape one thread decodes at a time, at most."""
    return max(1, min(_MOST_BATCH, _BATCH_BYTES // math.prod(shape)))


def decode_all(images: Sequence[bytes], shape: Shape) -> tuple[npt.NDArray[np.uint8], dict[int, str]]:
    """Decode images in several threads.

    Returns (uint8[images, height, width, channels], what is wrong with each that can't be decoded, by its
    number; its row is zeros).
    """
    rows = np.zeros((len(images), *shape), np.uint8)
    problems: dict[int, str] = {}
    size = batch_size(shape)

    def fill(first: int) -> None:
        for number in range(first, min(first + size, len(images))):
            try:
                rows[number] = decode(images[number], shape)
            except Undecodable as error:
                problems[number] = str(error)

    for _ in map_ordered(fill, range(0, len(images), size), MOST_THREADS):
        pass
    return rows, dict(sorted(problems.items()))


# Columns of tables


def with_images(batch: Any, shape: Shape | None, path: Path, first_row: int = 0) -> Any:
    """Return a record batch whose columns of images, structs of `bytes` and `path`, are tensors uint8.

    `first_row` is the number of its first row in the file, for messages. Raises SizeNeeded without a shape,
    DamagedImages.
    """
    for number, field in enumerate(batch.schema):
        if not is_image(field.type):
            continue
        images = _bytes_of(batch.column(number), field.name, path, first_row)
        if shape is None:
            found = suggest_shape(measure(io.BytesIO(data)) for data in images[:_MOST_MEASURED])
            raise SizeNeeded(f"{path}, whose column {field.name!r} holds images", found)
        rows, problems = decode_all(images, shape)
        if problems:
            place = f"{path}: the image in column {field.name!r} of row"
            named = tuple(f"{place} {first_row + row} {what}" for row, what in problems.items())
            raise DamagedImages(named)
        tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(rows)
        batch = batch.set_column(number, field.name, tensor)
    return batch


def require_images(schema: Any, shape: Shape | None, path: Path) -> None:
    """Raise SourceError if images are to be decoded, and no column has some."""
    if shape is not None and not any(is_image(each.type) for each in schema):
        raise SourceError(
            f"--images decodes columns of images, which are structs of bytes and path. Received: {path} with "
            f"{', '.join(f'{each.name} of type {each.type}' for each in schema)}. Leave it out, or write the "
            f"bytes of images as such structs, {{'bytes': data, 'path': None}}"
        )


def is_image(kind: Any) -> bool:
    """Return whether an Arrow type is that of images of Hugging Face datasets."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != _STRUCT:
        return False
    of_bytes = kind.field("bytes").type
    return bool(pa.types.is_binary(of_bytes) or pa.types.is_large_binary(of_bytes))


def _bytes_of(values: Any, name: str, path: Path, first_row: int) -> list[bytes]:
    found = values.field("bytes").to_pylist()
    missing = next((row for row, data in enumerate(found) if data is None), None)
    if missing is None:
        return list(found)
    elsewhere = values.field("path")[missing].as_py()
    held = f"the path {elsewhere} alone" if elsewhere else "nothing"
    raise SourceError(
        f"{path}: a column of images holds the bytes of each. Received: {held} in column {name!r} of row "
        f"{first_row + missing}. Save the data set with its images, or drop the row"
    )
