"""Images of noise, and archives of samples of them."""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def make_image(seed: int = 0, size: tuple[int, int] = (20, 12), mode: str = "RGB") -> Any:
    """Return an image of noise of `size` (width, height)."""
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 1 << 16, size[::-1], dtype=np.uint16))
    return Image.fromarray(rng.integers(0, 256, (*size[::-1], 4), dtype=np.uint8)).convert(mode)


def encode(image: Any, format: str = "PNG", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format, **options)
    return sink.getvalue()


def write_images(folder: Path, names: Sequence[str], **options: Any) -> list[Any]:
    """Write a PNG of each name below `folder`. Returns the images."""
    images = [make_image(seed, **options) for seed in range(len(names))]
    for name, image in zip(names, images, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encode(image))
    return images


def scale(image: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Return what Pillow itself makes of an image."""
    height, width, channels = shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it drops transparency
        converted = image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
    return np.asarray(converted.resize((width, height), Image.Resampling.BILINEAR)).reshape(shape)


def write_tar(path: Path, members: Mapping[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path
