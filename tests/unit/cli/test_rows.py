"""`insitu head`, `insitu stats` and `insitu diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner, run

from insitu.base.errors import InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.cli.rows import draw_bars, format_value, print_statistics
from insitu.grid import Catalog, import_cache


@pytest.fixture
def pets(home: Path, tmp_path: Path) -> str:
    """Twelve drawings of two classes; version 1 is kept beside version 2."""
    paths, folder = Paths(home), tmp_path / "pets"
    folder.mkdir()
    for seed, name in enumerate(("cat", "dog\x1b[2J")):
        np.save(folder / f"{name}.npy", np.full((6, 5, 5), seed, np.uint8))
    for version in (1, 2):
        import_cache(paths, "pets", [str(folder)], label_from_filename=True, overwrite=True, partitions=2)
        if version == 1:
            Catalog(paths).pin("pets", 1, "job")
            np.save(folder / "cat.npy", np.full((6, 5, 5), 7, np.uint8))
    return "pets"


def test_the_first_rows_are_a_table(pets: str) -> None:
    done = CliRunner().run(["head", pets, "-n", "3"])
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["x", "label"] and len(lines) == 4
    assert lines[1].startswith("uint8[5,5] mean 7") and lines[1].endswith("0 cat")
    assert "The first 3 of 12 rows of pets version 2" in done.stderr and "\x1b" not in done.output
    shown = json.loads(run("head", "pets@1", "--json").stdout)
    assert (shown["name"], shown["version"], len(shown["rows"])) == ("pets", 1, 10)
    assert shown["rows"][0] == {"x": [[0] * 5] * 5, "label": 0}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.arange(784, dtype=np.uint8).reshape(28, 28), "uint8[28,28] mean 125.1"),
        (np.array([0.5, 2.0]), "[0.5, 2]"),
        (np.arange(5), "int64[5] mean 2"),
        (np.empty(0, np.int32), "[]"),
        (np.float32(0.1), "0.1"),
        (np.bool_(True), "True"),
        ("a\n b", "a b"),
    ],
)
def test_values_are_short(value: Any, shown: str) -> None:
    assert format_value(value) == shown


def test_statistics_of_all_rows_or_of_some_are_printed(pets: str) -> None:
    text = run("stats", pets).stdout
    assert text.startswith("pets version 2, all 12 rows:") and "0 cat 50%" in text and "\x1b" not in text
    assert "12 rows" in run("stats", pets, "--sample", "100").stdout
    found = json.loads(run("stats", "pets@1", "--sample", "5", "--seed", "3", "--json").stdout)
    assert (found["rows"], found["rows_of_cache"], found["seed"], found["version"]) == (5, 12, 3, 1)
    assert "5 rows, drawn at random, of 12 rows:" in run("stats", pets, "--sample", "5").stdout


def test_facts_of_columns_are_formatted(capsys: pytest.CaptureFixture[str]) -> None:
    names = "minimum maximum mean deviation not_finite nan infinite zeros histogram different is_estimate"
    empty = dict.fromkeys([*names.split(), "frequent", "shortest", "longest"])
    x = empty | {"name": "x", "dtype": "float32", "minimum": -1.5, "maximum": 2.0, "mean": 0.25, "zeros": 0.5}
    x |= {"nan": 1200, "infinite": 1, "different": 5000, "is_estimate": True}
    x["histogram"] = {"edges": [-2, 0, 2, 4], "counts": [1, 0, 80]}
    word = empty | {"name": "word", "dtype": "str", "shortest": 1, "longest": 9, "different": 1}
    word["frequent"] = [["a\x1b[2J", 4]]
    found = {"name": "rows", "version": 1, "rows": 4, "run": 1, "rows_of_cache": 1000, "columns": [x, word]}
    print_statistics(found)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "rows version 1, 4 rows, drawn at random, of 1,000 rows:"
    assert said[2].split("  ")[-2:] == ["|▁ █|", "-"] or "|▁ █|" in said[2]
    assert "1,200 NaN, 1 infinite" in said[2] and "50.0%" in said[2] and "~5,000" in said[2]
    assert "1 characters" in said[3] and "\x1b" not in said[3] and said[3].endswith("100%")
    assert draw_bars([0, 1, 1000]) == "|\u0020▁█|"


def test_versions_are_compared(pets: str) -> None:
    runner = CliRunner()
    same = runner.run(["diff", "pets", "pets@2"])
    assert same.exit_code == 0 and "pets@2 and pets@2 are equal" in same.stdout
    other = runner.run(["diff", "pets@1", "pets"])
    assert other.exit_code == 1 and "pets@1 and pets@2 differ" in other.stdout
    assert "rows by position: 0 added, 0 removed, 6 changed, 6 the same" in other.stdout
    assert "uint8[5,5] mean 0" in other.stdout.replace("int64", "uint8")
    shown = json.loads(runner.run(["diff", "pets@1", "pets", "--json"]).stdout)
    assert shown["changed_by_column"] == {"x": 6} and len(shown["examples"]) == 5
    for arguments, error in (
        (("pets@7", "pets"), UnknownCache),
        (("pets@1", "pets", "--key", "x"), InputError),
    ):
        refused = runner.run(["diff", *arguments])
        assert isinstance(refused.exception, error) and refused.exception.exit_code == 2


def test_a_note_is_kept_with_its_version(home: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(4))
    source = str(tmp_path / "a.npz")
    run("import", "a", source, "--version-note", " first load \x1b[2J")
    assert "note       first load \\x1b[2J" in run("describe", "a").stdout
    assert json.loads(run("describe", "a", "--json").stdout)["note"] == "first load \x1b[2J"
    run("import", "a", source, "--append")
    assert json.loads(run("describe", "a", "--json").stdout)["note"] is None
    with pytest.raises(InputError, match=r"1 to 1000 characters\. Received: 1001"):
        run("import", "a", source, "--overwrite", "--version-note", "x" * 1001)
    with pytest.raises(InputError, match="Leave it out"):
        run("import", "a", source, "--overwrite", "--version-note", " ")
    Catalog(Paths(home)).pin("a", 2, "job")
    run("import", "a", source, "--overwrite", "--version-note", "third")
    assert "version 2" in run("describe", "a@2").stdout and "note" not in run("describe", "a@2").stdout
    assert "third" in run("describe", "a").stdout
