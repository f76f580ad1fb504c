"""Where compiled code comes from, and that nothing depends on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from insitu.exchange import native


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No folder beside the source, and an empty cache of the user's."""
    source = tmp_path / "nowhere" / "kernels.c"
    monkeypatch.setattr(native, "_SOURCE", _Elsewhere(native._SOURCE, source.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "insitu"


class _Elsewhere(type(Path())):  # type: ignore[misc]
    """The source, as if it lay in a folder that can't be written to."""

    def __new__(cls, source: Path, folder: Path) -> _Elsewhere:
        made: _Elsewhere = super().__new__(cls, source)
        made._folder = folder
        return made

    @property
    def parent(self) -> Path:
        return self._folder  # type: ignore[no-any-return]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_compiled_once_and_kept_for_this_user(fresh: Path) -> None:
    library = native._library()
    assert library is not None and library.parent == fresh
    assert fresh.stat().st_mode & 0o077 == 0
    made = library.stat().st_mtime_ns
    assert native._library() == library and library.stat().st_mtime_ns == made
    assert [path.name for path in fresh.iterdir()] == [library.name]


def test_without_a_compiler_there_is_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native._library() is None


def test_a_compiler_that_fails_is_as_good_as_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/false")
    assert native._library() is None
    assert not fresh.exists() or not list(fresh.iterdir())


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_NATIVE", "0")
    assert native.kernels.__wrapped__() is None
