"""Text as times, beside Python's own `strptime`."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.grid.sources.text_forms import parse_times

FORMS = ("%d.%m.%Y", "%Y%m%d", "%m/%d/%Y %H:%M:%S", "%d %b %Y", "%Y-%m-%dT%H:%M%z")


@given(
    form=st.sampled_from(FORMS),
    date=st.tuples(st.integers(1980, 2040), st.integers(1, 12), st.integers(1, 31)),
    clock=st.tuples(st.integers(0, 23), st.integers(0, 59), st.integers(0, 59)),
)
def test_days_are_those_of_python_or_refused(
    form: str, date: tuple[int, ...], clock: tuple[int, ...]
) -> None:
    (year, month, day), (hour, minute, second) = date, clock
    name = datetime(2000, month, 1).strftime("%b")
    parts = {"%d": f"{day:02}", "%m": f"{month:02}", "%Y": f"{year}", "%b": name, "%z": "+0200"}
    text = form
    for key, value in {**parts, "%H": f"{hour}", "%M": f"{minute}", "%S": f"{second:02}"}.items():
        text = text.replace(key, value)
    texts = pa.array(["01.01.2000" if form == FORMS[0] else None, text, None], pa.large_utf8())
    try:
        expected = datetime.strptime(text, form)
    except ValueError:
        with pytest.raises(pa.ArrowInvalid, match="doesn't fit"):
            parse_times(texts, form, "us")
        return
    found = parse_times(texts, form, "us").to_pylist()
    assert found[1] == expected and found[2] is None


@pytest.mark.parametrize(
    ("text", "form"),
    [("31.02.2020", "%d.%m.%Y"), ("1.2.21", "%d.%m.%Y"), ("30 feb 2021", "%d %b %Y"), ("12:60", "%H:%M")],
)
def test_times_that_do_not_exist_are_refused(text: str, form: str) -> None:
    with pytest.raises(pa.ArrowInvalid):
        parse_times(pa.array([text]), form, "us")


@pytest.mark.parametrize(
    ("text", "form", "time"),
    [
        ("1.2.2020  5:3", "%d.%m.%Y %H:%M", datetime(2020, 2, 1, 5, 3)),
        ("Monday 3 February 2020", "%a %d %b %Y", datetime(2020, 2, 3)),
        ("02/03/20 05:03 PM", "%m/%d/%y %I:%M %p", datetime(2020, 2, 3, 17, 3)),
        ("2020-045", "%Y-%j", datetime(2020, 2, 14)),
        ("1580700000", "%s", datetime(2020, 2, 3, 3, 20)),
    ],
)
def test_other_forms_are_read(text: str, form: str, time: datetime) -> None:
    assert parse_times(pa.array([text]), form, "us").to_pylist() == [time]
