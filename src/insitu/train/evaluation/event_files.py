"""Write scalars, histograms and graphs to event files, as TensorBoard reads them, without TensorFlow.

An event file is a sequence of records: length (uint64), CRC of it, bytes, CRC of those. The bytes are a
message `Event` of protocol buffers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from insitu.base.paths import EVENT_FILE

_BUCKETS = 30
"""Buckets of a histogram."""
_SESSION_START = 1


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of the graph that TensorBoard draws."""

    #: Its name; a slash puts it into a group.
    name: str
    #: Its kind of operation.
    operation: str
    #: The names of the nodes that it takes.
    inputs: Sequence[str] = ()
    #: Devices of its variables, as the backend names them; "" without any.
    device: str = ""


class EventFile:
    """One event file in a folder, which is made. Each call of `write` is on the disk when it returns.

    `folder` may be a URL of a file system of fsspec that can append, as `insitu://` can; then it is there.
    """

    def __init__(self, folder: Path | str) -> None:
        now = time.time()
        name = f"{EVENT_FILE}{int(now)}.{socket.gethostname()}.{os.getpid()}.v2"
        self.path: Path | str = f"{folder}/{name}"
        """Its path or URL."""
        if not is_url(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.path = Path(folder, name)
        self._append(_double(1, now) + _text(3, "brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one event with all `scalars`, by tag."""
        summary = b"".join(
            _bytes(1, _text(1, tag) + _float(2, float(value))) for tag, value in scalars.items()
        )
        self._append(_double(1, time.time()) + _varint(2, step) + _bytes(5, summary))

    def write_histograms(self, step: int, arrays: Mapping[str, NDArray[np.floating]]) -> None:
        """Append one event with a histogram of each array's finite values, by tag."""
        summary = b"".join(
            _bytes(1, _text(1, tag) + _bytes(5, _encode_histogram(values))) for tag, values in arrays.items()
        )
        self._append(_double(1, time.time()) + _varint(2, step) + _bytes(5, summary))

    def write_graph(self, nodes: Sequence[GraphNode]) -> None:
        """Append a graph."""
        graph = b"".join(
            _bytes(
                1,
                _text(1, node.name)
                + _text(2, node.operation)
                + b"".join(_text(3, name) for name in node.inputs)
                + (_text(4, node.device) if node.device else b""),
            )
            for node in nodes
        )
        self._append(_double(1, time.time()) + _bytes(4, graph))

    def begin_at(self, step: int) -> None:
        """Append that a training resumes at `step`: readers forget what other files have of later steps."""
        self._append(_double(1, time.time()) + _varint(2, step) + _bytes(7, _varint(1, _SESSION_START)))

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        with _open_to_append(self.path) as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def is_url(folder: Path | str) -> bool:
    """Return whether a folder is in a file system that fsspec opens."""
    return isinstance(folder, str) and "://" in folder


def _open_to_append(path: Path | str) -> Any:
    if isinstance(path, Path):
        return path.open("ab")
    import fsspec

    return fsspec.open(path, "ab")


def compute_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    return int(google_crc32c.value(data))


def _encode_histogram(array: NDArray[np.floating]) -> bytes:
    """Return the message `HistogramProto` of an array."""
    values = np.asarray(array, np.float64).ravel()
    values = values[np.isfinite(values)]
    if not values.size:
        return b""
    counts, edges = np.histogram(values, bins=_BUCKETS)
    sums = (values.min(), values.max(), values.size, values.sum(), np.square(values).sum())
    return (
        b"".join(_double(field, float(value)) for field, value in enumerate(sums, 1))
        + _bytes(6, np.asarray(edges[1:], "<f8").tobytes())
        + _bytes(7, np.asarray(counts, "<f8").tobytes())
    )


def _checksum(data: bytes) -> bytes:
    """Return the CRC as the format has it: rotated, since a CRC over a CRC is weak."""
    crc = compute_crc(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _key(field: int, wire: int) -> bytes:
    return bytes([field << 3 | wire])


def _number(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(field: int, value: int) -> bytes:
    return _key(field, 0) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _key(field, 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _number(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())
