"""Columns as values of Ignite: read again they are what they were, and as a real server wrote them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from ignite_recording import PAGE_ROWS, RECORDED

from insitu.base.errors import InputError
from insitu.base.spec import Column
from insitu.extensions.ignite import encoding
from insitu.extensions.ignite.encoding import Piece, encode_column, join, lay_out
from insitu.extensions.ignite.fields import decode_rows, find_fields
from insitu.extensions.ignite.protocol import CacheConfiguration, decode_page, decode_type
from insitu.extensions.ignite.rows import find_rows
from insitu.grid.sources import ColumnOptions, SourceOptions

CONFIGURATION = CacheConfiguration("CACHE", "PARTITIONED", 0, "", "", frozenset())
WIDENED = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "float16": "float32"}
LONG_TEXTS = st.sampled_from([300 * "x", 70000 * "y"])
TEXTS = LONG_TEXTS | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def columns(draw: st.DrawFn) -> tuple[Column, Any]:
    """A column with its values, of 1 to 5 rows that all columns of a table cut to their number."""
    inner = draw(st.sampled_from(["", "", "meta.", "meta.more."]))
    name = inner + draw(st.text("abcdefgh", min_size=1, max_size=8))
    if draw(st.booleans()):
        return Column(name, "str"), np.array(draw(st.lists(TEXTS, min_size=5, max_size=5)), object)
    dtype = draw(st.sampled_from([*WIDENED, "int8", "int16", "int32", "int64", "float32", "float64", "bool"]))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    return Column(name, dtype, shape), draw(arrays.arrays(dtype, (5, *shape)))


TABLES = st.lists(columns(), min_size=1, max_size=6, unique_by=lambda pair: pair[0].name)


@given(TABLES, st.integers(1, 5))
def test_what_is_written_is_read_again(table: list[tuple[Column, Any]], rows: int):
    layout = lay_out("example.Row", [column for column, _ in table])
    kinds = {kind.number: kind for kind in layout.kinds}
    keys = encode_column(Column("key", "int64"), np.arange(rows))
    data = memoryview(
        join([keys, layout.encode({column.name: values[:rows] for column, values in table})]).data.tobytes()
    )
    found_rows = find_rows(data, rows)
    found_fields = find_fields(found_rows, CONFIGURATION, kinds.__getitem__, ColumnOptions(), SourceOptions())
    found = decode_rows(found_fields, found_rows, kinds.__getitem__)
    read = {column.name: column for column in found_fields.columns}
    for column, values in table:
        if column.dtype == "str":
            assert found[column.name].to_pylist() == values[:rows].tolist()
            continue
        expected = values[:rows].reshape(rows, -1)
        bits = column.shape and column.dtype in ("int8", "uint8")
        dtype = "uint8" if bits else WIDENED.get(column.dtype, column.dtype)
        expected = expected.view("uint8") if bits else expected.astype(dtype)
        assert read[column.name].dtype == dtype
        np.testing.assert_array_equal(found[column.name].reshape(rows, -1), expected)


@given(st.lists(st.lists(st.binary(max_size=9), min_size=4, max_size=4), min_size=1, max_size=5))
def test_pieces_are_joined_row_by_row(texts: list[list[bytes]]):
    pieces = [
        Piece(np.frombuffer(b"".join(rows), np.uint8), np.array([len(row) for row in rows])) for rows in texts
    ]
    joined = join(pieces)
    expected = [b"".join(rows) for rows in zip(*texts, strict=True)]
    assert joined.data.tobytes() == b"".join(expected)
    assert joined.lengths.tolist() == [len(row) for row in expected]


def java_hash(data: bytes) -> int:
    value = 1
    for byte in data:
        value = (31 * value + byte - (256 if byte > 127 else 0)) & 0xFFFFFFFF
    return value


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_hashes_are_those_of_java(rows: list[bytes]):
    piece = Piece(np.frombuffer(b"".join(rows), np.uint8), np.array([len(row) for row in rows]))
    assert encoding.hash_contents(piece).tolist() == [java_hash(row) for row in rows]


def test_schemas_and_hashes_are_those_of_a_real_server():
    messages = {name: bytes.fromhex(text) for name, text in json.loads(RECORDED.read_text()).items()}
    kinds = [decode_type(memoryview(data)) for name, data in messages.items() if name.startswith("type ")]
    schemas = [(number, fields) for kind in kinds if kind for number, fields in kind.schemas.items()]
    assert schemas and all(encoding.schema_number(fields) == number for number, fields in schemas)
    page = decode_page(memoryview(messages["page"]), None)
    rows = find_rows(page.data, page.rows)
    checked = 0
    for start in rows.values.tolist():
        head = np.frombuffer(bytes(page.data[start : start + 24]), "<i4")
        if page.data[start] == 103:
            contents: npt.NDArray[np.uint8] = np.frombuffer(page.data, np.uint8)
            body = contents[start + 24 : start + int(head[5])]
            found = encoding.hash_contents(Piece(body, np.array([len(body)])))
            assert int(found[0]) == int(head[2]) & 0xFFFFFFFF
            checked += 1
    assert checked == PAGE_ROWS or any(page.data[start] == 27 for start in rows.values.tolist())


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (Column("x", "uint64"), "x of uint64. Leave it out with --without x"),
        (Column("x", "int32[*]"), r"x of int32\[\*\]"),
    ],
)
def test_what_java_has_no_type_for_is_refused(column: Column, message: str):
    with pytest.raises(InputError, match=message):
        lay_out("example.Row", [column])


def test_names_that_ignite_takes_for_one_are_refused():
    with pytest.raises(InputError, match=r"in lower case. Received: a, A"):
        lay_out("example.Row", [Column("a", "int32"), Column("A", "int32")])
    with pytest.raises(InputError, match=r"is a value or an object. Received: columns a, a.b"):
        lay_out("example.Row", [Column("a", "int32"), Column("a.b", "int32")])


@pytest.mark.parametrize("column", [Column("x", "float32"), Column("x", "int32", (2,)), Column("x", "bool")])
def test_keys_are_whole_numbers_or_text(column: Column):
    with pytest.raises(InputError, match="--key must be a column of whole numbers or text"):
        encoding.check_key(column)
