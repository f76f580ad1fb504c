"""Write scalars to event files, as TensorBoard reads them, without TensorFlow.

An event file is a sequence of records: length (uint64), CRC of it, bytes, CRC of those. The bytes are a
message `Event` of protocol buffers.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
"""Of CRC-32C, its bits reversed."""


def _make_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _make_table()


class EventFile:
    """One event file in a folder, which is made. Each call of `write` is on the disk when it returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.v2"
        self.path = folder / name
        """Where it lies."""
        self._append(_double(1, now) + _text(3, "brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append one event with all `scalars`, by tag."""
        summary = b"".join(
            _bytes(1, _text(1, tag) + _float(2, float(value))) for tag, value in scalars.items()
        )
        self._append(_double(1, time.time()) + _varint(2, step) + _bytes(5, summary))

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        with self.path.open("ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def compute_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


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
