"""Rows in Ignite's binary format as columns: every type, any layout, and what can't be a column."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite_columns import CONFIGURATION, SQL_DATE_HEAD, decimal_bytes, key, read
from ignite_wire import NULL, array, binary_object, binary_type, number

from insitu.base.errors import InputError, SourceError
from insitu.base.spec import Column
from insitu.extensions.ignite import objects, rows
from insitu.extensions.ignite.fields import decode_rows, find_fields
from insitu.extensions.ignite.protocol import BinaryType, CacheConfiguration
from insitu.extensions.ignite.rows import find_rows
from insitu.extensions.ignite.wire import Malformed, pack_byte_array, pack_int, pack_string
from insitu.grid.sources import ColumnOptions, SourceOptions, parse_column_options


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


LOCAL_DATE = b"\xfe\x0e\x00\x00\x00e\xeb\xdf6\x06\xb2H\x03\xe4\x07\x00\x00\x01\x02"
FLOATS = st.floats(width=32, allow_nan=False)
DOUBLES = st.floats(allow_nan=False)
KINDS: dict[str, tuple[int, st.SearchStrategy[Any], Callable[[Any], bytes], Callable[[Any], Any]]] = {
    "byte": (1, integers(8), lambda v: number(1, "b", v), int),
    "short": (2, integers(16), lambda v: number(2, "h", v), int),
    "int": (3, integers(32), lambda v: number(3, "i", v), int),
    "long": (4, integers(64), lambda v: number(4, "q", v), int),
    "float": (5, FLOATS, lambda v: number(5, "f", v), float),
    "double": (6, DOUBLES, lambda v: number(6, "d", v), float),
    "char": (7, st.integers(0, 65535), lambda v: number(7, "H", v), int),
    "bool": (8, st.booleans(), lambda v: number(8, "?", v), bool),
    "text": (9, st.text(max_size=12), pack_string, str),
    "uuid": (
        10,
        st.uuids(),
        lambda v: bytes([10]) + struct.pack("<QQ", v.int >> 64, v.int & (1 << 64) - 1),
        lambda v: list(v.bytes),
    ),
    "date": (11, integers(64), lambda v: number(11, "q", v), int),
    "bytes": (12, st.binary(min_size=6, max_size=6), pack_byte_array, list),
    "ints": (14, st.lists(integers(32), min_size=2, max_size=2), lambda v: array(14, "i", v), list),
    "doubles": (17, st.lists(DOUBLES, min_size=3, max_size=3), lambda v: array(17, "d", v), list),
    "bools": (19, st.lists(st.booleans(), min_size=2, max_size=2), lambda v: array(19, "?", v), list),
    "enum": (28, integers(32), lambda v: bytes([38]) + pack_int(77) + pack_int(v), int),
    "decimal": (
        30,
        st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30),
        decimal_bytes,
        float,
    ),
    "timestamp": (
        33,
        st.tuples(st.integers(-(10**12), 10**12), st.integers(0, 999_999)),
        lambda v: bytes([33]) + struct.pack("<qi", *v),
        lambda v: v[0] * 10**6 + v[1],
    ),
    "time": (36, integers(64), lambda v: number(36, "q", v), int),
    "sql date": (254, integers(64), lambda v: SQL_DATE_HEAD + struct.pack("<q", v), int),
}
"""Name -> (type code, values, how one is written, what a column has of it)."""


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[str], list[list[Any]], list[list[bool]]]:
    """Kinds of fields, the values of each row, and whether the field is in the inner object."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=8, unique=True))
    rows = draw(st.lists(st.tuples(*(KINDS[name][1] for name in names)), min_size=1, max_size=12))
    inner = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    return names, [list(row) for row in rows], [inner]


@settings(deadline=None)
@given(caches(), st.booleans(), st.sampled_from([0, 4]), st.booleans())
def test_objects_of_any_layout_become_columns(cache: Any, compact: bool, width: int, wrapped: bool):
    names, rows, (inner,) = cache
    outer_names = [n for n, inside in zip(names, inner, strict=True) if not inside]
    inner_names = [n for n, inside in zip(names, inner, strict=True) if inside]
    meta = binary_type("Meta", [(n, KINDS[n][0]) for n in inner_names])
    outer = binary_type("Outer", [*((n, KINDS[n][0]) for n in outer_names), ("meta", 103)])
    values = []
    for row in rows:
        written = {n: KINDS[n][2](value) for n, value in zip(names, row, strict=True)}
        nested = binary_object(meta, [(n, written[n]) for n in inner_names], compact=compact, width=width)
        fields = [(n, written[n]) for n in outer_names] + [("meta", nested)]
        value = binary_object(outer, fields, compact=compact, width=width)
        values.append(bytes([27]) + pack_int(len(value)) + value + pack_int(0) if wrapped else value)
    options = ColumnOptions() if inner_names else ColumnOptions(without=frozenset(["meta"]))
    _, found = read(values, [meta, outer], options)
    assert found.keys() == {"key", *outer_names, *(f"meta.{n}" for n in inner_names)}
    np.testing.assert_array_equal(found["key"], range(len(rows)))
    for place, (name, inside) in enumerate(zip(names, inner, strict=True)):
        expected = [KINDS[name][3](row[place]) for row in rows]
        assert found[f"meta.{name}" if inside else name].tolist() == expected


FILLS: dict[str, Any] = {
    **dict.fromkeys(["byte", "short", "int", "long", "char", "date", "time", "timestamp", "sql date"], 7),
    "float": 0.5,
    "double": 0.5,
    "decimal": 0.5,
    "text": "?",
    "bool": True,
}
"""What takes the place of null, by kind."""


@settings(deadline=None)
@given(st.data())
def test_rows_of_any_schemas_and_layouts_are_one_table(data: st.DataObject):
    """Each row has some of the fields, in any order, some null, in a form of its own."""
    names = data.draw(st.lists(st.sampled_from(sorted(FILLS)), min_size=1, max_size=6, unique=True))
    count = data.draw(st.sampled_from([1, 2, 7, 80]))
    schemas = data.draw(st.lists(st.permutations(names), min_size=1, max_size=3))
    schemas = [schema[: data.draw(st.integers(0, len(names)))] for schema in schemas] + [names]
    kind = binary_type("Row", [(name, KINDS[name][0]) for name in names], *schemas)
    pools = {name: data.draw(st.lists(KINDS[name][1], min_size=1, max_size=3)) for name in names}
    choose = data.draw(st.randoms(use_true_random=False))
    values, expected = [], []
    for row in range(count):
        schema = choose.choice(schemas) if row else names
        found = {name: choose.choice([None, *pools[name]]) if row else pools[name][0] for name in schema}
        fields = [(name, NULL if v is None else KINDS[name][2](v)) for name, v in found.items()]
        layout = {"compact": choose.random() < 0.5, "width": choose.choice([0, 4])}
        values.append(binary_object(kind, fields, **layout, raw=choose.choice([b"", b"\x09raw"])))
        expected.append({n: FILLS[n] if found.get(n) is None else KINDS[n][3](found[n]) for n in names})
    fills = {name: str(FILLS[name]) for name in names}
    _, table = read(values, [kind], ColumnOptions(fills=fills))
    for name in names:
        assert table[name].tolist() == [row[name] for row in expected]


@settings(deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_values_that_are_no_objects_make_one_column(name: str, data: st.DataObject):
    _code, strategy, write, expect = KINDS[name]
    values = data.draw(st.lists(strategy, min_size=1, max_size=20))
    columns, found = read(list(map(write, values)))
    assert list(columns) == ["key", "value"]
    assert found["value"].tolist() == list(map(expect, values))


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(1, 4), st.integers(0, 3))
def test_damaged_bytes_are_an_error_and_nothing_else(junk: bytes, count: int, keep: int):
    kind = binary_type("Outer", [("a", 3), ("text", 9)])
    value = binary_object(kind, [("a", number(3, "i", 5)), ("text", pack_string("abc"))])
    data = (key(0) + value) * keep + junk
    try:
        rows = find_rows(data, count + keep)
        fields = find_fields(
            rows, CONFIGURATION, {kind.number: kind}.__getitem__, ColumnOptions(), SourceOptions()
        )
        decode_rows(fields, rows, {kind.number: kind}.__getitem__)
    except (Malformed, SourceError, InputError, KeyError):
        pass


def test_an_object_that_stands_twice_in_a_row_is_read_twice():
    meta = binary_type("Meta", [("x", 3)])
    outer = binary_type("Outer", [("a", 103), ("b", 103)])
    nested = binary_object(meta, [("x", number(3, "i", 7))])
    handle = bytes([102]) + pack_int(len(nested))
    _, found = read([binary_object(outer, [("a", nested), ("b", handle)])] * 3, [meta, outer])
    assert found["a.x"].tolist() == found["b.x"].tolist() == [7, 7, 7]


def test_what_a_handle_leads_to_is_named_where_it_is_no_column():
    row = binary_type("Row", [("a", 24), ("b", 24), ("n", 3)])
    listed = bytes([24]) + pack_int(1) + b"\1" + pack_string("a")
    fields = [("a", listed), ("b", bytes([102]) + pack_int(len(listed))), ("n", number(3, "i", 1))]
    values = [binary_object(row, fields)] * 2
    with pytest.raises(SourceError, match=r"a is Collection.*b is Collection.*--without b"):
        read(values, [row])
    _, found = read(values, [row], ColumnOptions(without=frozenset(["a", "b"])))
    assert found["n"].tolist() == [1, 1]


def test_an_object_that_its_own_field_leads_to_is_refused_in_bounded_time():
    person = binary_type("Person", [("age", 3), ("boss", 103), ("spouse", 103)])
    age = number(3, "i", 7)
    # Both fields lead back to where the object begins, behind its header and age.
    fields = [("age", age), ("boss", bytes([102]) + pack_int(29)), ("spouse", bytes([102]) + pack_int(34))]
    with pytest.raises(SourceError, match=r"boss is an object that holds it.*--without boss; spouse is"):
        read([binary_object(person, fields)] * 3, [person])
    _, found = read(
        [binary_object(person, fields)] * 3, [person], ColumnOptions(without=frozenset(["boss", "spouse"]))
    )
    assert found["age"].tolist() == [7, 7, 7]


def test_objects_that_share_others_at_each_level_are_refused_in_bounded_time():
    node = binary_type("Node", [("l", 103), ("r", 103)])
    value = NULL
    for _ in range(25):
        value = binary_object(node, [("l", value), ("r", bytes([102]) + pack_int(len(value)))])
    with pytest.raises(SourceError, match=r"A row has at most 4096 fields"):
        read([value], [node])


def test_enums_of_two_classes_are_refused_whose_numbers_mean_others():
    color, size = (BinaryType(number, name) for number, name in ((77, "Color"), (78, "Size")))

    def enum(kind: BinaryType, ordinal: int) -> bytes:
        return bytes([28]) + pack_int(kind.number) + pack_int(ordinal)

    with pytest.raises(SourceError, match=r"value is an enum of Color and of Size.*--without value"):
        read([enum(color, 1), enum(size, 1)], [color, size])
    with pytest.raises(SourceError, match=r"value is an enum whose class isn't registered"):
        read([bytes([28]) + pack_int(0) + pack_string("Color") + pack_int(1)] * 2)
    first, later = (find_rows(key(0) + enum(kind, 2), 1) for kind in (color, size))
    fields = find_fields(first, CONFIGURATION, lambda _: color, ColumnOptions(), SourceOptions())
    assert decode_rows(fields, first, lambda _: color)["value"].tolist() == [2]
    with pytest.raises(SourceError, match=r"All enums of column value must be of the class that those"):
        decode_rows(fields, later, lambda _: color)


def people(*schemas: Sequence[str]) -> BinaryType:
    return binary_type("Person", [("age", 3), ("height", 6), ("city", 9)], *schemas)


def test_a_field_that_some_rows_lack_is_nan_or_filled_or_refused():
    kind = people(["age"], ["age", "height"], ["age", "city"])
    values = [
        binary_object(kind, [("age", number(3, "i", 1))]),
        binary_object(kind, [("age", number(3, "i", 2)), ("height", number(6, "d", 1.5))]),
        binary_object(kind, [("age", NULL), ("city", pack_string("Rome"))]),
    ]
    with pytest.raises(
        SourceError, match=r"Column age must have a value.*null in 1 of 3 rows, first where key is 2"
    ):
        read(values, [kind], ColumnOptions(fills={"city": "?"}))
    _, found = read(values, [kind], ColumnOptions(fills={"city": "?", "age": "-1"}))
    assert found["age"].tolist() == [1, 2, -1]
    assert found["city"].tolist() == ["?", "?", "Rome"]
    assert math.isnan(found["height"][0]) and found["height"][1] == 1.5
    _, found = read(values, [kind], ColumnOptions(without=frozenset(["city", "age"])))
    assert list(found) == ["key", "height"]


def test_null_objects_leave_their_fields_null():
    meta, outer = binary_type("Meta", [("x", 6)]), binary_type("Outer", [("meta", 103)])
    nested = binary_object(meta, [("x", number(6, "d", 2.5))])
    _, found = read(
        [binary_object(outer, [("meta", value)]) for value in (nested, NULL, nested)], [meta, outer]
    )
    assert found["meta.x"][[0, 2]].tolist() == [2.5, 2.5] and math.isnan(found["meta.x"][1])


def test_bytes_become_tensors_of_any_dtype():
    pixels = np.arange(24, dtype="<f4").reshape(2, 12)
    options = parse_column_options({"tensor": ["value=float32[3, 4]"]})
    columns, found = read([pack_byte_array(row.tobytes()) for row in pixels], options=options)
    assert columns["value"] == Column("value", "float32", (3, 4))
    np.testing.assert_array_equal(found["value"], pixels.reshape(2, 3, 4))
    with pytest.raises(SourceError, match=r"one shape. Received: float32\[3, 4\] and byte\[\] of 4 elements"):
        read([pack_byte_array(bytes(48)), pack_byte_array(bytes(4))], options=options)


def test_lists_of_different_lengths_need_ragged():
    lists = [[1, 2], [], [3]]
    values = [array(14, "i", values) for values in lists]
    with pytest.raises(
        SourceError, match=r"value is int\[\] of 0 to 2 elements. Import it as it is with --ragged"
    ):
        read(values)
    columns, found = read(values, ragged=["value"])
    assert columns["value"].dtype == "int32[*]"
    assert [np.frombuffer(v.as_buffer(), np.int32).tolist() for v in found["value"]] == lists


def test_an_array_that_no_row_has_is_said_to_be_null():
    kind = binary_type("Row", [("a", 14), ("n", 3)])
    value = binary_object(kind, [("a", NULL), ("n", number(3, "i", 1))])
    with pytest.raises(SourceError, match=r"a is int\[\], null in all of the first rows.*--ragged a"):
        read([value], [kind])
    _, found = read([value], [kind], ColumnOptions(fills={"a": ""}), ragged=["a"])
    assert found["a"].to_pylist() == [b""]


def stream(*rows: int) -> bytes:
    batch = pa.record_batch({"x": pa.array(rows, pa.int32()), "text": [f"t{row}" for row in rows]})
    target = io.BytesIO()
    with pa.ipc.new_stream(target, batch.schema) as writer:
        writer.write_batch(batch)
    return pack_byte_array(target.getvalue())


def test_arrow_data_gives_its_columns():
    columns, found = read([stream(1), stream(2)], options=ColumnOptions(arrow=frozenset(["value"])))
    assert list(columns) == ["key", "x", "text"] and columns["x"] == Column("x", "int32")
    assert len(found["value"]) == 2
    with pytest.raises(SourceError, match=r"must hold an Arrow IPC stream"):
        read([pack_byte_array(b"no arrow")], options=ColumnOptions(arrow=frozenset(["value"])))


def test_arrow_data_whose_offsets_point_elsewhere_is_refused():
    """Also where there are several batches, which are put together."""
    batch = pa.record_batch({"text": ["ab", "cd"]})
    target = io.BytesIO()
    with pa.ipc.new_stream(target, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    right, wrong = np.array([0, 2, 4], "<i4").tobytes(), np.array([0, 2, 1 << 30], "<i4").tobytes()
    data = target.getvalue()
    assert data.count(right) == 2
    with pytest.raises(SourceError, match=r"must hold an Arrow IPC stream"):
        read([pack_byte_array(data.replace(right, wrong))], options=ColumnOptions(arrow=frozenset(["value"])))


def test_all_that_cant_be_a_column_is_named_with_the_way_out():
    kind = binary_type("Bad", [("list", 24), ("names", 20), ("good", 3), ("gone", 103)])
    fields = [
        ("list", bytes([24]) + pack_int(1) + b"\0" + pack_string("a")),
        ("names", bytes([20]) + pack_int(1) + pack_string("a")),
        ("good", number(3, "i", 1)),
        ("gone", NULL),
    ]
    with pytest.raises(SourceError) as caught:
        read([binary_object(kind, fields)], [kind])
    text = str(caught.value)
    assert "3 parts" in text and "--without list" in text and "names is String[]" in text
    assert "gone is null in all of the first 1 rows" in text and "--dtype list=json" in text
    _, found = read(
        [binary_object(kind, fields)], [kind], ColumnOptions(without=frozenset(["list", "names", "gone"]))
    )
    assert found["good"].tolist() == [1]


CAT = binary_type("Cat", [("age", 3), ("lives", 3), ("weight", 6)])
DOG = binary_type(
    "Dog", [("age", 3), ("tricks", 9), ("weight", 5)], ["age", "tricks"], ["age", "tricks", "weight"]
)


def cat(age: int) -> bytes:
    return binary_object(
        CAT, [("age", number(3, "i", age)), ("lives", number(3, "i", 9)), ("weight", number(6, "d", age / 2))]
    )


def dog(age: int, tricks: str = "sit") -> bytes:
    return binary_object(DOG, [("age", number(3, "i", age)), ("tricks", pack_string(tricks))])


def test_objects_of_several_classes_have_the_columns_of_all():
    values = [cat(1), dog(2), cat(3)]
    with pytest.raises(SourceError, match=r"Column lives must have a value.*null in 1 of 3 rows.*lives=null"):
        read(values, [CAT, DOG])
    options = ColumnOptions(fills={"lives": "null", "tricks": "null"})
    columns, found = read(values, [DOG, CAT], options)
    assert list(columns) == [
        *("key", "age", "lives", "lives_is_null", "tricks", "tricks_is_null", "weight"),
    ]
    assert columns["lives_is_null"] == Column("lives_is_null", "bool")
    assert found["age"].tolist() == [1, 2, 3] and found["lives"].tolist() == [9, 0, 9]
    assert found["lives_is_null"].tolist() == [False, True, False]
    assert found["tricks"].to_pylist() == ["", "sit", ""]
    assert found["tricks_is_null"].tolist() == [True, False, True]
    assert math.isnan(found["weight"][1]) and found["weight"][[0, 2]].tolist() == [0.5, 1.5]


def test_fields_of_one_name_are_of_one_type_in_all_classes():
    heavy = [("age", number(3, "i", 1)), ("tricks", NULL), ("weight", number(5, "f", 1))]
    with pytest.raises(SourceError, match=r"weight is float and double in turn.*--dtype weight=json"):
        read([cat(1), binary_object(DOG, heavy)], [CAT, DOG], ColumnOptions(fills={"lives": "0"}))


def test_a_class_that_none_of_the_first_rows_is_of_is_named():
    types = {kind.number: kind for kind in (CAT, DOG)}
    fields = find_fields(
        find_rows(key(0) + cat(1), 1),
        *(CONFIGURATION, types.__getitem__, ColumnOptions(), SourceOptions()),
    )
    later = find_rows(key(0) + cat(1) + key(1) + dog(2), 2)
    with pytest.raises(SourceError, match=r"first rows are of: Cat. Received: Dog.*--without value"):
        decode_rows(fields, later, types.__getitem__)


@pytest.mark.parametrize("rows", [3, 100])
def test_null_is_text_or_a_number_beside_a_column_that_says_it(rows: int):
    """Also where fields stand at equal distances, side by side."""
    names = [("a", 3), ("b", 4), ("c", 6), ("d", 8), ("text", 9)]
    kind = binary_type("Row", names)
    values = [
        binary_object(
            kind,
            [
                ("a", NULL if index == 1 else number(3, "i", index)),
                ("b", number(4, "q", index)),
                ("c", number(6, "d", math.nan if index == 2 else index)),
                ("d", number(8, "?", index % 2)),
                ("text", NULL if index == 1 else pack_string(str(index))),
            ],
        )
        for index in range(rows)
    ]
    with pytest.raises(SourceError, match=r"Column a must have"):
        read(values, [kind])
    fills = {"a": "null", "text": "null", "c": "null", "b": "null"}
    _, found = read(values, [kind], ColumnOptions(fills=fills))
    assert found["a"].tolist() == [0, 0, *range(2, rows)]
    assert found["text"].to_pylist() == ["0", "", *map(str, range(2, rows))]
    assert found["c"].tolist() == [0.0, 1.0, 0.0, *range(3, rows)]
    for name, missing in (("a", [1]), ("text", [1]), ("c", [2]), ("b", [])):
        assert np.flatnonzero(found[f"{name}_is_null"]).tolist() == missing, name


def test_where_nothing_is_null_the_column_says_that():
    names = [("a", 3), ("b", 4), ("c", 6), ("d", 8)]
    kind = binary_type("Row", names)
    forms = {"a": (3, "i"), "b": (4, "q"), "c": (6, "d"), "d": (8, "?")}

    def value(index: int) -> bytes:
        return binary_object(kind, [(name, number(*forms[name], index % 2)) for name, _ in names])

    _, found = read(
        [value(index) for index in range(100)], [kind], ColumnOptions(fills={"a": "null", "c": "null"})
    )
    assert found["a"].tolist() == found["c"].tolist() == [index % 2 for index in range(100)]
    assert not found["a_is_null"].any() and not found["c_is_null"].any() and "b_is_null" not in found


@pytest.mark.parametrize("word", ["mean", "most"])
def test_words_that_need_all_values_are_refused(word: str):
    for value in (pack_string("a"), number(6, "d", 1)):
        with pytest.raises(SourceError, match=f"--fill says '{word}'.*--fill value=null"):
            read([value], options=ColumnOptions(fills={"value": word}))


def test_values_of_two_types_are_named():
    with pytest.raises(SourceError, match=r"value is int and String in turn"):
        read([number(3, "i", 1), pack_string("a")])


def test_what_java_itself_serialized_is_a_column_if_it_is_a_date_of_sql():
    row = binary_type("Row", [("day", 103)])

    def rows(*values: bytes) -> list[bytes]:
        return [binary_object(row, [("day", value)]) for value in values]

    date = SQL_DATE_HEAD + struct.pack("<q", -86_400_000)
    columns, found = read(rows(date, date), [row])
    assert columns["day"].dtype == "int64" and found["day"].tolist() == [-86_400_000] * 2
    other = b"\xfe" + pack_int(15) + b"e" + date[6:]
    for values in [(LOCAL_DATE,), (date, LOCAL_DATE), (date, other), (b"\xfe" + pack_int(0),)]:
        with pytest.raises(
            SourceError, match=r"day is an object that Java itself .* java\.time.*without day"
        ):
            read(rows(*values), [row])
    fields = find_fields(
        find_rows(b"".join([key(0), *rows(date)]), 1),
        *(CONFIGURATION, lambda _: row, ColumnOptions(), SourceOptions()),
    )
    with pytest.raises(SourceError, match=r"day must be of one type. Received: Date and an object"):
        decode_rows(fields, find_rows(b"".join([key(0), *rows(LOCAL_DATE)]), 1), lambda _: row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ColumnOptions(fills={"valu": "1"}), "--fill must name a column.*Received: valu,.*has key, value"),
        (ColumnOptions(tensors={"value": ("uint8", (2,))}), "--tensor must name a column"),
        (ColumnOptions(without=frozenset(["other"])), "--without must name a column"),
        (
            ColumnOptions(fills={"value": "much"}),
            "value is of int32, and --fill says 'much'. Give such a value",
        ),
        (ColumnOptions(fills={"value": "3000000000"}), "Give such a value"),
        (ColumnOptions(arrow=frozenset(["value"])), r"value is int, where --arrow needs byte\[\]"),
    ],
)
def test_options_that_fit_no_column_are_refused(options: ColumnOptions, message: str):
    with pytest.raises(InputError, match=message):
        read([number(3, "i", 1)], options=options)


def test_a_sql_table_has_the_names_of_its_columns():
    kind = binary_type("SQL_PUBLIC_CITY", [("NAME", 9)])
    value = binary_object(kind, [("NAME", pack_string("Rome"))])
    table = CacheConfiguration("SQL_PUBLIC_CITY", "PARTITIONED", 0, "ID", "", frozenset(["ID"]))
    columns, found = read([value], [kind], configuration=table)
    assert list(columns) == ["ID", "NAME"] and found["ID"].tolist() == [0]
    pair = binary_type("Pair", [("A", 3), ("B", 9)])
    table = CacheConfiguration("SQL_PUBLIC_T", "PARTITIONED", 0, "", "", frozenset(["A", "B"]))
    columns, found = read(
        [value],
        [kind, pair],
        configuration=table,
        keys=lambda i: binary_object(pair, [("A", number(3, "i", i)), ("B", pack_string("b"))]),
    )
    assert list(columns) == ["A", "B", "NAME"]


def test_a_field_named_like_the_key_keeps_its_name():
    kind = binary_type("Row", [("key", 3)])
    columns, _ = read([binary_object(kind, [("key", number(3, "i", 1))])], [kind])
    assert list(columns) == ["_key", "key"]


def test_decimals_are_rounded_to_the_nearest_float():
    texts = ["0.1", "-12345678901234567890.123456789", "0", "99999999999999999999999999999", "1e-30", "-0.30"]
    _, found = read([decimal_bytes(Decimal(text)) for text in texts])
    assert found["value"].tolist() == list(map(float, texts))
    with pytest.raises(SourceError, match=r"smaller than 1.8e308"):
        read([bytes([30]) + struct.pack("<ii", -400, 1) + b"\x01"])


def test_timestamps_beyond_64_bits_are_refused():
    with pytest.raises(SourceError, match=r"must be in \[1678, 2262\)"):
        read([bytes([33]) + struct.pack("<qi", 10**13, 0)])


def test_rows_of_one_length_and_of_many_are_found_alike():
    kind = binary_type("Row", [("a", 3), ("t", 9)])
    equal = [binary_object(kind, [("a", number(3, "i", i)), ("t", pack_string("xy"))]) for i in range(5)]
    other = binary_object(kind, [("a", number(3, "i", 5)), ("t", pack_string("long text"))])
    wrapped = [bytes([27]) + pack_int(len(value)) + value + pack_int(0) for value in [*equal, other]]
    for values in (equal, [*equal, other], wrapped, [*wrapped, other]):
        rows = find_rows(b"".join(key(i) + value for i, value in enumerate(values)), len(values))
        assert rows.ends[-1] == len(rows.data)
        assert [bytes(rows.data[a:b]) for a, b in zip(rows.values, rows.ends, strict=True)] == values
    with pytest.raises(Malformed):
        find_rows(key(0) + equal[0][:-1], 1)
    with pytest.raises(Malformed):
        find_rows(key(0) + equal[0] + b"\0", 1)
    with pytest.raises(Malformed):
        find_rows(key(0) + wrapped[0] + key(1) + wrapped[-1][:-1], 2)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("inside", [b"", b"ggggg", b"itself"])
def test_short_rows_are_found_at_once_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool, inside: bytes
) -> None:
    """Also where values hold what looks like the beginning of an object."""
    kind = binary_type("Short", [("data", 12)])

    def value(index: int) -> bytes:
        held = binary_object(kind, [("data", pack_byte_array(b"held"))]) if inside == b"itself" else inside
        made = binary_object(kind, [("data", pack_byte_array(held + b"x" * (index % 5)))])
        return bytes([27]) + pack_int(len(made)) + made + pack_int(0) if wrapped else made

    values = [value(index) for index in range(100)]
    data = b"".join(key(index) + each for index, each in enumerate(values))
    at_once = rows._scan_objects(np.frombuffer(data, np.uint8), data, 100)
    assert (at_once is not None) == (inside != b"itself")
    found = find_rows(data, 100)
    monkeypatch.setattr(rows, "_LEAST_SCANNED", 1000)
    expected = find_rows(data, 100)
    for name in ("keys", "values", "ends"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    monkeypatch.undo()
    length = int(found.values[50]) + (1 if wrapped else 12)
    longer = data[:length] + bytes([data[length] + 1]) + data[length + 1 :]
    for damaged in (data[:-1], data + b"\0", longer):
        assert rows._scan_objects(np.frombuffer(damaged, np.uint8), damaged, 100) is None


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("null_at", [None, 40])
def test_fields_at_equal_distances_are_read_as_those_at_any(
    monkeypatch: pytest.MonkeyPatch, compact: bool, null_at: int | None
) -> None:
    """Numbers before a text are at one distance in all objects, those behind it don't."""
    names = [("a", 4), ("b", 6), ("c", 8), ("d", 3), ("text", 9), ("e", 1)]
    kind = binary_type("Mixed", names, [name for name, _ in names])

    def row(index: int) -> bytes:
        fields = [
            ("a", number(4, "q", -index)),
            ("b", number(6, "d", index / 3)),
            ("c", number(8, "?", index % 2)),
            ("d", NULL if index == null_at else number(3, "i", index * 7)),
            ("text", pack_string("x" * (index % 5))),
            ("e", number(1, "b", index % 100)),
        ]
        return binary_object(kind, fields, compact=compact)

    values = [row(index) for index in range(100)]
    options = ColumnOptions(fills={"d": "-1"})
    _, found = read(values, [kind], options)
    monkeypatch.setattr(objects, "_LEAST_ALIGNED", 1000)
    _, expected = read(values, [kind], options)
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert (found[name].equals(column)) if name == "text" else (found[name] == column).all(), name
        assert getattr(found[name], "dtype", None) == getattr(column, "dtype", None)
    d = [-1 if index == null_at else index * 7 for index in range(100)]
    assert found["d"].tolist() == d and found["c"].tolist() == [index % 2 == 1 for index in range(100)]
    assert found["text"].to_pylist() == ["x" * (index % 5) for index in range(100)]
