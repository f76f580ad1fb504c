"""Conditions of `--where`."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from insitu.base.errors import InputError
from insitu.grid.sources.conditions import Condition

TABLE = pa.table(
    {
        "n": [1, 2, 3],
        "age": [1, 20, None],
        "city": ["a", "Rome", "b"],
        "Kunde Nr.": [1, 2, 3],
        "at": [datetime.datetime(2020, 1, day) for day in (1, 2, 3)],
        "user.x": [1.0, 2.0, float("nan")],
        "large": [2**53, 2**24 + 1, None],
        "byte": pa.array([100, -100, 0], pa.int8()),
        "unsigned": pa.array([2**64 - 1, 0, 1], pa.uint64()),
        "kind": pa.array(["a", "b", None]).dictionary_encode(),
    }
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("age > 18", [2]),
        ("not (age > 18)", [1]),  # of a missing age nothing is known
        ("age is None", [3]),
        ("age is not None", [1, 2]),
        ("user.x is None", [3]),
        ("user.x < 2", [1]),
        ('city in ["a", "b"]', [1, 3]),
        ('city not in ["a", "b"]', [2]),
        ("age not in [1]", [2]),  # of a missing age nothing is known
        ("not (age in [1])", [2]),
        ("age in [1, None]", [1, 3]),
        ('kind in ["a"]', [1]),
        ('kind not in ["a"]', [2]),
        ('kind != "b"', [1]),
        ('col("Kunde Nr.") >= 2 and city != "b"', [2]),
        ("1 < n < 3 or n == 3", [2, 3]),
        ('at > "2020-01-01 12:00:00"', [2, 3]),
        ('at in ["2020-01-01"]', [1]),
        ("n * 2 - 1 > -1 + n", [1, 2, 3]),
        ("n / 2 == 1", [2, 3]),  # whole numbers are divided as Arrow divides them
        ("-1 < n", [1, 2, 3]),
        ("large > 0.5", [1, 2]),
        ("large * 1.5 == 25165825.5", [2]),  # no float32 holds it
        ("byte * 2 > 150", [1]),  # no int8 holds it
        ("unsigned > 5", [1]),
    ],
)
def test_rows_that_fulfil_it_are_kept(text: str, kept: list[int]) -> None:
    condition = Condition(text)
    condition.check(TABLE.schema.names)
    assert condition.filter(TABLE)["n"].to_pylist() == kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age >", "invalid syntax"),
        ("1 > 0", "names no column"),
        ("foo > 1", "Received: foo. A name"),
        ('age > "x"', "compares values of one type.*age int64"),
        ("len(city) > 1", "Received: len. A name"),
        ("__import__('os').system('id')", "with|names columns"),
        ("[n for n in age]", "with|names no column"),
        ("age is 1", "`is` is for None"),
        ("city in age", "`in` takes a list"),
        ("age in [n]", "a list has numbers or texts"),
        ("(lambda: age)()", "with"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        condition = Condition(text)
        condition.check(TABLE.schema.names)
        condition.filter(TABLE)
