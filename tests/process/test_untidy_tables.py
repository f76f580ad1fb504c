"""Tables as people have them get in by two commands at most, the second being the one that the first "
"prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_hosts import insitu
from untidy_tables import ROWS, make_columns, write_nested, write_texts

from insitu.base.paths import Paths
from insitu.grid import sample_rows


def import_by_two(home: Path, *arguments: str) -> tuple[dict[str, Any], int]:
    """Import into cache c. Returns all rows by column, in the order of the column `id`, and the commands."""
    done = insitu(home, "import", "c", *arguments, code=None, NO_COLOR="1")
    commands = 1
    if done.returncode:
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        found = re.search(r"as in: insitu (.*)", done.stderr)
        assert found, done.stderr
        insitu(home, *shlex.split(found[1]), NO_COLOR="1")
        commands = 2
    sample = sample_rows(Paths(home), "c", 10**6)
    columns = {
        name: np.array(each.to_pylist() if hasattr(each, "to_pylist") else each)
        for name, each in sample.columns.items()
    }
    order = np.argsort(columns[next(iter(columns))], kind="stable")
    return {name: values[order] for name, values in columns.items()}, commands


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize(
    "name",
    [
        *("semicolon.csv", "decimal_comma.csv", "tabs.csv", "tabs.tsv", "bars.csv", "comma.csv", "utf16.csv"),
        *("no_header.csv", "packed.csv.gz", "packed.csv.bz2", "latin.csv"),
    ],
)
def test_text_gets_in_as_it_was_written(texts: dict[str, Path], tmp_path: Path, name: str) -> None:
    found, commands = import_by_two(tmp_path, str(texts[name]))
    columns = make_columns()
    if name == "no_header.csv":
        columns = dict(zip((f"column_{number}" for number in range(1, 8)), columns.values(), strict=True))
    number, city, since, calls, income, zip_code, left = columns
    mask = f"{calls}_is_null"
    assert commands == 2 and list(found) == [number, city, since, calls, mask, income, zip_code, left]
    for exact in (number, zip_code, left):
        assert found[exact].tolist() == columns[exact]
    assert found[since].astype("M8[us]").tolist() == columns[since]
    assert found[calls].tolist() == [each or 0 for each in columns[calls]]
    assert found[mask].tolist() == [each is None for each in columns[calls]]
    np.testing.assert_array_equal(found[income], np.array(columns[income], float))
    encoding = "cp1252" if name == "latin.csv" else "utf-8"
    assert found[city].tolist() == [
        each.encode(encoding, "replace").decode(encoding) for each in columns[city]
    ]


def test_nested_tables_get_in(tmp_path: Path) -> None:
    files = write_nested(tmp_path)
    found, commands = import_by_two(tmp_path / "a", str(files["nested.parquet"]))
    assert commands == 2 and len(found["id"]) == ROWS
    assert found["geo.lon"].tolist() == [float(i) for i in range(ROWS)]
    assert found["tags"][:4].tolist() == ["[]", '["a"]', '["a", "b"]', "[]"]
    assert found["plan"][:2].tolist() == ["paid", "free"] and found["text_is_null"][:2].tolist() == [
        True,
        False,
    ]
    np.testing.assert_array_equal(found["price"][:8], [np.nan, *range(1, 7), np.nan])
    assert found["day"][25] == np.datetime64("2019-01-02").astype(int) and found["at"][1] % 3_600_000_000 == 0
    found, commands = import_by_two(tmp_path / "b", str(files["nested.jsonl"]))
    assert commands == 2 and found["user.name"][:2].tolist() == ["u0", "u1"]
    assert found["user.age"][:3].tolist() == [0, 1, 2] and found["user.age_is_null"][:2].tolist() == [
        True,
        False,
    ]
    found, commands = import_by_two(tmp_path / "c", str(files["hive"]))
    assert commands == 1 and (found["i"] % 2).tolist() == found["label"].tolist() == [0, 1, 0, 1]


def test_the_standard_input_is_a_source(texts: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "insitu", "import", "c", "-", "--format", "csv"]
    home = {**os.environ, "INSITU_HOME": str(tmp_path), "NO_COLOR": "1"}
    data = texts["comma.csv"].read_bytes()
    first = subprocess.run(command, input=data, env=home, capture_output=True, timeout=60, check=False)
    found = re.search(r"as in: insitu (import c - .*)", first.stderr.decode())
    assert first.returncode == 2 and found, first.stderr
    subprocess.run([*command[:3], *shlex.split(found[1])], input=data, env=home, check=True, timeout=60)
    assert len(sample_rows(Paths(tmp_path), "c", 10**6).columns["zip"]) == ROWS
