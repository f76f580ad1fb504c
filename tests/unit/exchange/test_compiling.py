"""Compiling on first use, and the absence of a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from insitu.exchange import compiling, native


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a library is kept for this user, while none can be beside the source."""
    monkeypatch.setattr(compiling, "_get_cache_beside", lambda source: Path("/proc/nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "insitu"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_library_is_compiled_once_and_kept_for_this_user(cache: Path) -> None:
    assert native.load_kernels.__wrapped__() is not None
    assert cache.stat().st_mode & 0o077 == 0
    (library,) = cache.iterdir()
    made = library.stat().st_mtime_ns
    assert native.load_kernels.__wrapped__() is not None
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [made]


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/bin/true"])
def test_no_library_without_a_working_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    assert native.load_kernels.__wrapped__() is None
    assert not list(cache.glob("*"))


def test_use_of_numpy_is_logged_once_unless_requested(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiling.warn_about_numpy.cache_clear()
    with monkeypatch.context() as patched:
        patched.setenv("INSITU_NATIVE", "0")
        native.load_kernels.__wrapped__()
    assert not caplog.records
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for _ in range(2):
        native.load_kernels.__wrapped__()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "slower" in record.message and "gcc" in record.message


def test_library_that_cannot_be_loaded_is_ignored(cache: Path) -> None:
    made = compiling._find_library(native._SOURCE, compiling._get_user_cache(native._SOURCE))
    if made is not None:
        made.write_bytes(b"not a library")
    assert native.load_kernels.__wrapped__() is None


def test_insitu_native_0_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_NATIVE", "0")
    assert native.load_kernels.__wrapped__() is None


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [AttributeError("insitu_meet"), RuntimeError("no home directory")])
def test_no_library_if_it_is_damaged_or_without_a_home_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(compiling, "_get_user_cache", lambda source: _raise(error))
    assert native.load_kernels.__wrapped__() is None


def test_nothing_is_loaded_from_a_folder_that_others_can_write(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert native.load_kernels.__wrapped__() is None
    assert not list(cache.iterdir())
