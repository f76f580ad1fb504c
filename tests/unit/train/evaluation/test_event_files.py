"""Event files are read by TensorFlow's own reader, which checks the checksums."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from insitu.train.evaluation.event_files import EventFile, compute_crc


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_checksum_is_crc_32c(data: bytes, expected: int) -> None:
    """The values of RFC 3720."""
    assert compute_crc(data) == expected


def test_scalars_are_read_back(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    file = EventFile(tmp_path / "events")
    file.write(0, {"loss": 0.25})
    file.write(1 << 40, {"loss": -3.5, "größe": float("inf")})
    [path] = (tmp_path / "events").iterdir()
    first, *events = tf.compat.v1.train.summary_iterator(str(path))
    assert first.file_version == "brain.Event:2" and first.wall_time > 1e9
    assert [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in events] == [
        (0, {"loss": 0.25}),
        (1 << 40, {"loss": -3.5, "größe": float("inf")}),
    ]


def test_each_record_is_whole_when_write_returns(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for step in range(3):
        file.write(step, {"loss": 1.0})
        data, records = file.path.read_bytes(), 0
        while data:
            (length,) = struct.unpack_from("<Q", data)
            assert len(data) >= length + 16
            data, records = data[length + 16 :], records + 1
        assert records == step + 2
