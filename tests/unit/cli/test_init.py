"""`insitu init`: what it reads of a cache, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run

from insitu.base.errors import InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.grid import import_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def import_columns(name: str, **columns: Any) -> None:
    np.savez("rows.npz", **{key: np.asarray(values) for key, values in columns.items()})
    import_cache(Paths.default(), name, ["rows.npz"])


def test_the_script_and_the_command_that_runs_it_are_there(folder: Path) -> None:
    import_columns("rows/train", x=np.arange(40.0), label=np.arange(40) % 2)
    import_columns("rows/test", x=np.arange(4.0), label=[0, 1, 2, 1])
    done = run("init", "my_job", "--cache", "rows")
    assert done.stdout == "insitu start --workers 2 rows/train ./my_job train.py\n"
    assert [each.name for each in (folder / "my_job").iterdir()] == ["train.py"]
    script = (folder / "my_job" / "train.py").read_text()
    assert 'TEST = "rows/test"' in script
    # A class that only held-out rows have counts, too.
    assert "CLASSES = 3" in script


def test_a_cache_without_held_out_rows_is_said_to_have_none(folder: Path) -> None:
    import_columns("rows", x=np.arange(40.0), label=np.arange(40) % 2)
    done = run("init", "./jobs/first", "--cache", "rows")
    assert "No rows are held out: there is no rows/test" in done.stderr
    assert done.stdout.endswith("rows ./jobs/first train.py\n")
    assert "TEST" not in Path("jobs/first/train.py").read_text()


def test_a_folder_that_is_there_stays_as_it_is(folder: Path) -> None:
    import_columns("rows", x=np.arange(40.0), label=np.arange(40) % 2)
    (folder / "my_job").mkdir()
    with pytest.raises(InputError, match=r"MY_JOB is a folder that isn't there yet\. Received: my_job"):
        run("init", "my_job", "--cache", "rows")
    assert not list((folder / "my_job").iterdir())


def test_nothing_is_left_of_what_is_refused(folder: Path) -> None:
    import_columns("rows", x=np.arange(40.0), y=[*np.arange(39.0), np.nan])
    for arguments, said in (
        (("--cache", "rows"), "no column of the name label"),
        (("--cache", "rows", "--label", "y"), "column y of rows that is missing or not finite"),
    ):
        with pytest.raises(InputError, match=said):
            run("init", "my_job", *arguments)
    with pytest.raises(UnknownCache):
        run("init", "my_job", "--cache", "row")
    assert not (folder / "my_job").exists()


def test_a_label_of_many_numbers_is_predicted(folder: Path) -> None:
    import_columns("rows", x=np.arange(4000.0), price=np.arange(4000))
    run("init", "my_job", "--cache", "rows", "--label", "price")
    assert "Normalization(invert=True)" in (folder / "my_job" / "train.py").read_text()
