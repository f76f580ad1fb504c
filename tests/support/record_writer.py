"""Writes tf.train.Example records and TFRecord files, without TensorFlow."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from insitu.grid.sources.record_files import mask_checksum

Feature = tuple[str, Sequence[Any]]
"""("bytes", "float" or "int64", values)."""


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def chunk(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def encode_feature(feature: Feature, packed: bool = True) -> bytes:
    kind, values = feature
    if kind == "bytes":
        return chunk(1, b"".join(chunk(1, value) for value in values))
    if kind == "float":
        raw = [struct.pack("<f", value) for value in values]
        body = chunk(1, b"".join(raw)) if packed else b"".join(b"\x0d" + value for value in raw)
        return chunk(2, body if values else b"")
    numbers = [varint(value) for value in values]
    body = chunk(1, b"".join(numbers)) if packed else b"".join(b"\x08" + number for number in numbers)
    return chunk(3, body if values else b"")


def encode_features(features: Mapping[str, Feature], packed: bool = True) -> bytes:
    entries = (
        chunk(1, chunk(1, key.encode()) + chunk(2, encode_feature(value, packed)))
        for key, value in features.items()
    )
    return b"".join(entries)


def encode_example(features: Mapping[str, Feature], packed: bool = True) -> bytes:
    return chunk(1, encode_features(features, packed))


def encode_sequence(context: Mapping[str, Feature], lists: Mapping[str, Sequence[Feature]]) -> bytes:
    entries = (
        chunk(
            1, chunk(1, key.encode()) + chunk(2, b"".join(chunk(1, encode_feature(step)) for step in steps))
        )
        for key, steps in lists.items()
    )
    return chunk(1, encode_features(context)) + chunk(2, b"".join(entries))


def frame(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    checksums = (struct.pack("<I", mask_checksum(google_crc32c.value(part))) for part in (length, record))
    return length + next(checksums) + record + next(checksums)


def write_records(path: Path, records: Sequence[bytes]) -> None:
    """Write a file; packed where its name ends in .gz."""
    data = b"".join(map(frame, records))
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


def image_records(rows: int, side: int = 4, seed: int = 1) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """Return (images, labels, records of them)."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (rows, side, side), dtype=np.uint8)
    labels = rng.integers(0, 300, rows)
    records = [
        encode_example({"image_raw": ("bytes", [image.tobytes()]), "label": ("int64", [int(label)])})
        for image, label in zip(images, labels, strict=True)
    ]
    return images, labels, records
