"""What is said of the columns of sources."""

from __future__ import annotations

import re

import pytest

from insitu.base.errors import InputError
from insitu.grid.sources import parse_column_options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": ["image"]}, "--tensor names a column with its dtype"),
        ({"tensor": ["image=object[2]"]}, "--tensor names a column"),
        ({"tensor": ["image=uint8[0]"]}, "--tensor names a column"),
        ({"fill": ["age"]}, "--fill names a column and a value"),
        ({"fill": ["age=0", "age=1"]}, "--fill names each column once. Received: age twice"),
        ({"rename": ["age"]}, "--rename names a column and its new name"),
        ({"dtype": ["age=int"]}, "--dtype must be one of bool, uint8"),
    ],
)
def test_options_in_another_form_are_refused(given: dict[str, list[str]], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_column_options(given)


def test_options_are_those_that_were_given() -> None:
    given = {"tensor": ["x=uint8[2,3]"], "fill": ["a=0"], "arrow": ["b"], "without": ["c", "d"]}
    assert parse_column_options(given | {"ragged": ["e"]}).to_json() == given
    assert parse_column_options({}).given == ()
    assert parse_column_options(given).given == ("--without", "--fill", "--tensor", "--arrow")
