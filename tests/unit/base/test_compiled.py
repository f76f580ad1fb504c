"""Finding the compiled code, and what is said if there is none."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from insitu.base.compiled import load_library, locate_library
from insitu.base.errors import MissingLibrary


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A C file in a room of a package."""
    made = tmp_path / "src" / "insitu" / "room" / "kernels.c"
    made.parent.mkdir(parents=True)
    made.write_text("int one(void) { return 1; }")
    return made


def test_a_library_of_another_source_machine_or_option_is_not_found(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {locate_library(source)}
    monkeypatch.setenv("INSITU_SANITIZE", "thread")
    names.add(locate_library(source))
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    names.add(locate_library(source))
    source.write_text("int one(void) { return 2; }")
    names.add(locate_library(source))
    assert len(names) == 4


def test_where_there_is_no_library_the_error_names_the_remedy(source: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingLibrary, match="pip install --force-reinstall") as caught:
        load_library(source, ctypes.CDLL)
    assert caught.value.is_final, "the next attempt of a job would end the same way"
    (tmp_path / "hatch_build.py").touch()
    with pytest.raises(MissingLibrary, match=f"Run `python {tmp_path}/hatch_build.py`"):
        load_library(source, ctypes.CDLL)


def test_a_damaged_library_is_refused(source: Path) -> None:
    locate_library(source).write_bytes(b"not a library")
    with pytest.raises(MissingLibrary, match=r"can't be loaded \(.*too short"):
        load_library(source, lambda path: ctypes.CDLL(str(path)))
