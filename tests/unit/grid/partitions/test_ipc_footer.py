"""Places of record batches, beside what pyarrow reads there."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.partitions.ipc_message import PLACE, TAIL_BYTES, footer_bytes, read_places


def make_file(lengths: list[int]) -> bytes:
    sink = io.BytesIO()
    schema = pa.schema([pa.field("x", pa.int64()), pa.field("t", pa.large_utf8())], metadata={"a": "b"})
    with pa.ipc.new_file(sink, schema) as writer:
        for rows in lengths:
            columns = [pa.array(range(rows)), pa.array([str(i) for i in range(rows)], pa.large_utf8())]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue()


def places_of(data: bytes) -> np.ndarray:
    size = footer_bytes(data[-TAIL_BYTES:], len(data))
    end = len(data) - TAIL_BYTES
    return read_places(data[end - size : end], end - size)


@given(st.lists(st.integers(0, 200), max_size=12))
def test_each_batch_is_where_it_is_said_to_be(lengths: list[int]) -> None:
    data = make_file(lengths)
    reader, places = pa.ipc.open_file(data), places_of(data)
    assert len(places) == reader.num_record_batches == len(lengths)
    for number, place in enumerate(places):
        stop = place["offset"] + place["metadata_bytes"] + place["body_bytes"]
        message = pa.ipc.read_message(data[place["offset"] : stop])
        assert pa.ipc.read_record_batch(message, reader.schema).equals(reader.get_batch(number))
        assert message.body.size == place["body_bytes"]


@given(st.integers(0, 10_000), st.integers(1, 255), st.data())
def test_a_damaged_footer_is_an_error_or_gives_places_within_the_file(
    where: int, change: int, data: st.DataObject
) -> None:
    whole = make_file([3, 5])
    size = footer_bytes(whole[-TAIL_BYTES:], len(whole))
    end = len(whole) - TAIL_BYTES
    footer = bytearray(whole[end - size : end])
    for _ in range(data.draw(st.integers(1, 4))):
        footer[data.draw(st.integers(0, size - 1))] ^= change
    try:
        places = read_places(bytes(footer), end - size)
    except ValueError:
        return
    for place in places:
        assert place["offset"] >= 0
        assert place["offset"] + place["metadata_bytes"] + place["body_bytes"] <= end - size


@pytest.mark.parametrize(
    ("tail", "size", "message"),
    [
        (b"\x01\0\0\0ARROW2", 100, "isn't that of an Arrow file"),
        (b"", 100, "isn't that of an Arrow file"),
        (b"\xff\xff\xff\x7fARROW1", 100, "2147483647 bytes in a file of 100"),
        (b"\xff\xff\xff\xffARROW1", 100, "-1 bytes in a file of 100"),
    ],
)
def test_an_end_that_is_not_arrows_is_refused(tail: bytes, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        footer_bytes(tail, size)


def test_sums_that_overflow_are_no_places() -> None:
    whole = make_file([3])
    size = footer_bytes(whole[-TAIL_BYTES:], len(whole))
    end = len(whole) - TAIL_BYTES
    footer = whole[end - size : end]
    offset = int(places_of(whole)[0]["offset"]).to_bytes(8, "little")
    assert footer.count(offset) == 1
    with pytest.raises(ValueError, match="can't be right"):
        read_places(footer.replace(offset, (2**63 - 1).to_bytes(8, "little")), end - size)


def test_a_footer_without_batches_has_no_places() -> None:
    places = places_of(make_file([]))
    assert len(places) == 0 and places.dtype == PLACE
