"""What `insitu inspect` shows of sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import SourceError
from insitu.grid import inspect_files
from insitu.options import ImportOptions


def test_columns_are_shown_with_what_becomes_of_them(tmp_path: Path) -> None:
    table = pa.table(
        {"n": [3, None, 1], "name": ["x" * 50, "b", "c"], "tags": [["a"], [], []], "u": [0.5, 1, 2]}
    )
    for number in range(2):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    found = inspect_files(ImportOptions("CACHE", (str(tmp_path),)))
    assert (found.format, found.files, found.rows, found.has_exact_rows) == ("parquet", 2, 6, True)
    assert [each.name for each in found.columns] == ["n", "name", "tags", "u"]
    n, name, tags, u = found.columns
    assert (n.type, n.becomes, n.missing, n.minimum, n.maximum) == ("int64", "", 2, "1", "3")
    assert (name.becomes, name.missing) == ("name: text", 0)
    assert name.examples == ("x" * 37 + "...", "b", "c")
    assert (tags.becomes, tags.minimum) == ("", "") and u.becomes == "u: float64"
    assert found.problems == ("column 'n' misses 2 values", "column 'tags' is of type list<element: string>")
    assert found.command == f"insitu import CACHE {tmp_path} --fill n=null --dtype tags=json"
    assert found.to_json()["columns"][0]["missing"] == 2


def test_the_command_that_it_shows_has_the_options_that_were_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n;x\n1;\n;2\n")
    options = ImportOptions("CACHE", (str(tmp_path / "a.csv"),), rename=("x=y",))
    found = inspect_files(options)
    assert found.command.endswith("--rename x=y --fill n=null") or "--fill n=null" in found.command
    assert found.notes[0] == "a semicolon between fields" and not found.has_exact_rows


def test_arrays_have_types_alone(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 2, 3), np.float32))
    found = inspect_files(ImportOptions("CACHE", (str(tmp_path / "a.npy"),), column="image"))
    (column,) = found.columns
    assert (column.name, column.type, column.becomes) == ("image", "float32[2, 3]", "image: float32[2, 3]")
    assert (found.rows, found.has_exact_rows, found.problems) == (5, True, ())


def test_what_can_not_be_read_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(SourceError, match="can't be read"):
        inspect_files(ImportOptions("CACHE", (str(tmp_path),)))


def test_commands_name_columns_whose_names_look_like_options(tmp_path: Path) -> None:
    pq.write_table(pa.table({"-x": [1, None], "a=b": [None, 1]}), tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    found = inspect_files(ImportOptions("CACHE", (source,)))
    assert found.command == f"insitu import CACHE {source} --fill=-x=null --fill a=b=null"
    assert inspect_files(ImportOptions("CACHE", (source,), fill=("-x=null", "a=b=null"))).problems == ()


def test_what_is_advised_takes_the_place_of_what_was_given(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [["a"], []]}), tmp_path / "a.parquet")
    source = str(tmp_path / "a.parquet")
    found = inspect_files(ImportOptions("CACHE", (source,), dtype=("x=str",)))
    assert found.command == f"insitu import CACHE {source} --dtype x=json"
    assert inspect_files(ImportOptions("CACHE", (source,), dtype=("x=json",))).problems == ()


def test_a_folder_of_images_is_shown_with_its_size(tmp_path: Path) -> None:
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for number in range(3):
            pixels = np.full((8, 6, 3), number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    with pytest.raises(SourceError, match=r"`insitu import CACHE \S+ --label-from-folder --images 8x6x3`"):
        inspect_files(ImportOptions("CACHE", (str(tmp_path),)))
    given = ImportOptions("CACHE", (str(tmp_path),), images=(8, 6, 3), label_from_folder=True)
    found = inspect_files(given)
    assert (found.format, found.files, found.rows) == ("images", 6, 6)
    assert [column.name for column in found.columns][:1] == ["image"]
