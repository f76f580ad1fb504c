"""Collections, maps, arrays of objects and objects in rows of Ignite: lists, tensors and JSON."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from ignite_columns import SQL_DATE_HEAD, decimal_bytes, read
from ignite_wire import NULL, array, binary_object, binary_type, number

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.extensions.ignite.fields import decode_rows, find_fields
from insitu.extensions.ignite.protocol import CacheConfiguration
from insitu.extensions.ignite.rows import find_rows
from insitu.extensions.ignite.wire import Malformed, pack_byte_array, pack_int, pack_string
from insitu.grid.sources import ColumnOptions, SourceOptions, parse_column_options

AS_JSON = ColumnOptions(dtypes={"value": "json"})


def collection(*values: bytes) -> bytes:
    return bytes([24]) + pack_int(len(values)) + b"\1" + b"".join(values)


def objects(*values: bytes, kind: bytes = pack_int(-1)) -> bytes:
    return bytes([23]) + kind + pack_int(len(values)) + b"".join(values)


def mapping(*pairs: tuple[bytes, bytes]) -> bytes:
    return bytes([25]) + pack_int(len(pairs)) + b"\1" + b"".join(key + value for key, value in pairs)


def ints(*values: int) -> list[bytes]:
    return [number(3, "i", value) for value in values]


def named(*values: bytes) -> bytes:
    """An array whose class isn't registered: its name follows."""
    return objects(*values, kind=pack_int(0) + pack_string("java.lang.Integer"))


@pytest.mark.parametrize("make", [collection, objects, named])
def test_lists_of_one_length_are_tensors(make: Any):
    lists = [[1, 2, 3], [4, 5, 6], [-7, 8, 9]]
    columns, found = read([make(*ints(*values)) for values in lists])
    assert columns["value"] == Column("value", "int32", (3,))
    np.testing.assert_array_equal(found["value"], lists)
    assert found["value"].dtype == np.int32


@pytest.mark.parametrize(
    ("code", "form", "values", "dtype"),
    [
        (6, "d", [0.5, math.nan], "float64"),
        (5, "f", [0.25, -1.0], "float32"),
        (4, "q", [2**62, -1], "int64"),
        (1, "b", [-128, 127], "int8"),
        (8, "?", [True, False], "bool"),
        (11, "q", [0, -86_400_000], "int64"),
    ],
)
def test_elements_keep_their_type(code: int, form: str, values: list[float], dtype: str):
    columns, found = read([collection(*(number(code, form, each) for each in values))] * 2)
    assert columns["value"] == Column("value", dtype, (2,))
    np.testing.assert_array_equal(found["value"], [values, values])
    dates = bytes([22]) + pack_int(1) + number(11, "q", 5)
    assert read([dates])[1]["value"].tolist() == [[5]]


def test_lists_of_other_lengths_are_ragged():
    lists: list[list[int]] = [[1, 2], [], [3]]
    values = [collection(*ints(*each)) for each in lists]
    with pytest.raises(SourceError, match=r"value is Collection of 0 to 2 elements.*--ragged value"):
        read(values)
    columns, found = read([*values, NULL], ragged=["value"], options=ColumnOptions(fills={"value": ""}))
    assert columns["value"].dtype == "int32[*]"
    assert [np.frombuffer(v.as_buffer(), np.int32).tolist() for v in found["value"]] == [*lists, []]


def test_a_tensor_gives_the_shape_of_a_list():
    options = parse_column_options({"tensor": ["value=int32[2,2]"]})
    columns, found = read([collection(*ints(1, 2, 3, 4))], options=options)
    assert columns["value"].shape == (2, 2) and found["value"].tolist() == [[[1, 2], [3, 4]]]
    with pytest.raises(SourceError, match=r"--tensor says float64. Give --tensor value=int32\[2,2\]"):
        read(
            [collection(*ints(1, 2, 3, 4))], options=parse_column_options({"tensor": ["value=float64[2,2]"]})
        )


def test_lists_in_lists_are_tensors():
    """Such as double[][] and List<List<Integer>>."""
    rows = objects(array(17, "d", [1, 2, 3]), array(17, "d", [4, 5, 6]))
    columns, found = read([rows, rows])
    assert columns["value"] == Column("value", "float64", (2, 3))
    assert found["value"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2
    boxed = collection(collection(*ints(1, 2)), collection(*ints(3, 4)))
    columns, found = read([boxed])
    assert columns["value"] == Column("value", "int32", (2, 2)) and found["value"].tolist() == [
        [[1, 2], [3, 4]]
    ]


@pytest.mark.parametrize(
    "values",
    [
        [collection(pack_string("a"))],
        [collection(number(3, "i", 1), number(6, "d", 1))],
        [collection(number(3, "i", 1), NULL)],
        [collection(*ints(1)), collection(number(6, "d", 1))],
        [collection(collection(*ints(1, 2)), collection(*ints(3)))],
        [collection(number(3, "i", 1), pack_string("a"))],
        [collection(pack_string("long enough to look at"), number(3, "i", 1))],
        [collection()],
        [mapping((pack_string("a"), number(3, "i", 1)))],
        [bytes([20]) + pack_int(2) + pack_string("a") + NULL],
        [collection(*ints(1)), number(3, "i", 1)],
    ],
)
def test_other_values_name_the_option_that_makes_text_of_them(values: Sequence[bytes]):
    with pytest.raises(SourceError, match=r"1 part of .*--dtype value=json"):
        read(values)
    columns, found = read(values, options=AS_JSON)
    assert columns["value"] == Column("value", "str")
    assert all(isinstance(json.loads(text.as_py()), list | int) for text in found["value"])


META = binary_type("Meta", [("width", 3), ("tags", 24)])
DATE = SQL_DATE_HEAD + struct.pack("<q", -86_400_000)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NULL, None),
        (number(3, "i", -5), -5),
        (number(6, "d", 0.1), 0.1),
        (number(8, "?", True), True),
        (pack_string('\u65e5 "x"'), '\u65e5 "x"'),
        (collection(pack_string("a"), NULL, number(4, "q", 2**62)), ["a", None, 2**62]),
        (
            mapping((pack_string("a"), collection(*ints(1))), (number(3, "i", 2), NULL)),
            [["a", [1]], [2, None]],
        ),
        (pack_byte_array(b"\xff\1"), [255, 1]),
        (array(17, "d", [0.5]), [0.5]),
        (bytes([10]) + struct.pack("<QQ", 0x123, 0x8000000000000001), "00000000-0000-0123-8000-000000000001"),
        (
            decimal_bytes(Decimal("-12345678901234567890123456789012.50")),
            "-12345678901234567890123456789012.50",
        ),
        (bytes([33]) + struct.pack("<qi", 5, 7), 5_000_007),
        (bytes([28]) + pack_int(77) + pack_int(2), 2),
        (bytes([28]) + pack_int(0) + pack_string("Color") + pack_int(3), 3),
        (DATE, -86_400_000),
        (
            binary_object(META, [("width", number(3, "i", 3)), ("tags", collection(pack_string("t")))]),
            {"tags": ["t"], "width": 3},
        ),
    ],
)
def test_any_value_is_json(value: bytes, expected: Any):
    wrapped = bytes([27]) + pack_int(len(value)) + value + pack_int(0)
    given = [value, wrapped] if isinstance(expected, dict) else [value, value]
    _, found = read(given, [META], AS_JSON)
    assert [json.loads(text.as_py()) for text in found["value"]] == [expected, expected]


def test_null_is_json_unless_something_takes_its_place():
    values = [NULL, collection(*ints(1))]
    assert read(values, options=AS_JSON)[1]["value"].to_pylist() == ["null", "[1]"]
    filled = ColumnOptions(dtypes={"value": "json"}, fills={"value": "[]"})
    assert read(values, options=filled)[1]["value"].to_pylist() == ["[]", "[1]"]
    masked = ColumnOptions(dtypes={"value": "json"}, fills={"value": "null"})
    _, found = read(values, options=masked)
    assert found["value"].to_pylist() == ["", "[1]"] and found["value_is_null"].tolist() == [True, False]


def test_lists_that_are_null_are_named_or_filled():
    values = [collection(*ints(1, 2)), NULL]
    with pytest.raises(SourceError, match=r"Column value must have a value.*null in 1 of 2 rows"):
        read(values)
    assert read(values, options=ColumnOptions(fills={"value": "7"}))[1]["value"].tolist() == [[1, 2], [7, 7]]


def test_a_handle_leads_to_a_list_that_stands_before_it():
    kind = binary_type("Row", [("a", 24), ("b", 24)])
    inner = collection(*ints(1, 2))
    handle = bytes([102]) + pack_int(len(inner))
    value = binary_object(kind, [("a", inner), ("b", handle)])
    _, found = read([value], [kind])
    assert found["a"].tolist() == found["b"].tolist() == [[1, 2]]
    _, found = read([value], [kind], ColumnOptions(dtypes={"b": "json"}))
    assert found["b"].to_pylist() == ["[1, 2]"]


def test_an_object_that_leads_back_to_itself_isnt_json():
    kind = binary_type("Node", [("next", 103)])
    value = binary_object(kind, [("next", bytes([102]) + pack_int(24))])
    with pytest.raises(SourceError, match=r"at most 64 deep.*leads back.*--without value"):
        read([value], [kind], AS_JSON)


def test_what_cant_be_json_is_named():
    with pytest.raises(
        SourceError, match=r"Received: an object that Java itself serialized in column value.*--without value"
    ):
        read([collection(bytes([254]) + pack_int(0))], options=AS_JSON)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            collection(*ints(1)),
            r"one shape. Received: int32\[2\] and Collection of 1 elements.*--ragged value",
        ),
        (collection(number(6, "d", 1), number(6, "d", 2)), r"must hold int. Received: one with other"),
        (collection(number(3, "i", 1), NULL), r"must hold int.*--dtype value=json"),
        (objects(*ints(1, 2)), r"must be of one type. Received: Collection and Object\[\]"),
    ],
)
def test_later_lists_must_be_like_the_first_ones(later: bytes, message: str):
    configuration = CacheConfiguration("CACHE", "PARTITIONED", 0, "", "", frozenset())
    first = find_rows(number(4, "q", 0) + collection(*ints(1, 2)), 1)
    lookup: Any = {}.__getitem__
    fields = find_fields(first, configuration, lookup, ColumnOptions(), SourceOptions())
    with pytest.raises(SourceError, match=message):
        decode_rows(fields, find_rows(number(4, "q", 0) + later, 1), lookup)


def test_later_tensors_must_be_like_the_first_ones():
    configuration = CacheConfiguration("CACHE", "PARTITIONED", 0, "", "", frozenset())
    lookup: Any = {}.__getitem__

    def rows(*lists: bytes) -> Any:
        return find_rows(number(4, "q", 0) + collection(*lists), 1)

    fields = find_fields(
        rows(collection(*ints(1, 2))), configuration, lookup, ColumnOptions(), SourceOptions()
    )
    for other in (collection(*ints(1)), collection(number(6, "d", 1), number(6, "d", 1)), NULL):
        with pytest.raises(SourceError, match=r"int32\[1, 2\] and .*--dtype value=json"):
            decode_rows(fields, rows(other), lookup)


def test_options_name_columns_that_they_can_be_said_of():
    with pytest.raises(InputError, match="--dtype must name a column"):
        read([number(3, "i", 1)], options=ColumnOptions(dtypes={"other": "json"}))
    with pytest.raises(InputError, match="--ragged must name a column"):
        read([collection(*ints(1))], options=AS_JSON, ragged=["value"])


def test_lists_that_are_cut_off_are_malformed():
    whole = bytearray(collection(*ints(1, 2)))
    whole[1:5] = pack_int(-1)
    data = number(4, "q", 0) + bytes(whole)
    with pytest.raises(Malformed):
        find_rows(data, 1)
