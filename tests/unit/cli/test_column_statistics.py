"""`insitu describe CACHE --statistics`."""

from __future__ import annotations

import pytest

from insitu.cli.data import print_statistics

EMPTY = dict.fromkeys(
    [
        "minimum",
        "maximum",
        "mean",
        "deviation",
        "not_finite",
        "zeros",
        "histogram",
        "different",
        "frequent",
        "shortest",
        "longest",
    ]
)


def test_statistics_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    x = {
        **EMPTY,
        "name": "x",
        "dtype": "float32",
        "minimum": -1.5,
        "maximum": 2.0,
        "mean": 0.25,
        "zeros": 0.5,
    }
    word = {**EMPTY, "name": "word", "dtype": "str", "shortest": 1, "longest": 9, "different": 1}
    word["frequent"] = [["a\x1b[2J", 4]]
    print_statistics({"rows": 4, "run": 1, "rows_of_cache": 1000, "columns": [x, word]})
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "Statistics of 4 rows, drawn at random, of 1,000 rows:"
    assert said[3].split() == ["x", "-1.5", "2", "0.25", "-", "50.0%", "-", "-", "-"]
    assert "1 characters" in said[4] and "\x1b" not in said[4] and said[4].endswith("100%")
    print_statistics({"rows": 4, "run": 1, "rows_of_cache": 4, "columns": []})
    assert "Statistics of all 4 rows:" in capsys.readouterr().out
