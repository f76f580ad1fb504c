"""Options of `insitu import` that are more than a number or a text."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.options import ImportOptions, format_options
from insitu.options.import_options import parse_split


@pytest.mark.parametrize("text", ["train", "train=x", "a=0.5,a=0.5", ""])
def test_a_split_lists_parts_with_fractions(text: str) -> None:
    with pytest.raises(InputError, match="--split lists parts"):
        parse_split(text)
    split = {"train": 0.9, "test": 0.1}
    assert parse_split("train=0.9, test=0.1") == split
    assert format_options(ImportOptions("a", ("a.npy",), split=split)) == ["--split", "train=0.9,test=0.1"]
