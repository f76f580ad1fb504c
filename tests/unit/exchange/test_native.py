"""Where compiled code comes from, and that nothing depends on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from insitu.exchange import compiling, memory, native


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a library is kept for this user, while none can be beside the source."""
    monkeypatch.setattr(compiling, "_beside", lambda source: Path("/proc/nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "insitu"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_compiled_once_and_kept_for_this_user(cache: Path) -> None:
    assert native.kernels.__wrapped__() is not None
    assert cache.stat().st_mode & 0o077 == 0
    (library,) = cache.iterdir()
    made = library.stat().st_mtime_ns
    assert native.kernels.__wrapped__() is not None
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [made]


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/bin/true"])
def test_without_a_compiler_that_works_there_is_none(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    assert native.kernels.__wrapped__() is None
    assert not list(cache.glob("*"))


def test_that_numpy_is_used_is_said_once_unless_asked_for(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiling.warn_about_numpy.cache_clear()
    with monkeypatch.context() as patched:
        patched.setenv("INSITU_NATIVE", "0")
        native.kernels.__wrapped__()
    assert not caplog.records
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for _ in range(2):
        native.kernels.__wrapped__()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "slower" in record.message and "gcc" in record.message


def test_what_cannot_be_loaded_is_as_good_as_none(cache: Path) -> None:
    made = compiling._library(native._SOURCE, compiling._cache(native._SOURCE))
    if made is not None:
        made.write_bytes(b"not a library")
    assert native.kernels.__wrapped__() is None


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_NATIVE", "0")
    assert native.kernels.__wrapped__() is None


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("error", [AttributeError("insitu_meet"), RuntimeError("no home directory")])
def test_a_damaged_library_or_no_home_is_as_good_as_none(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(compiling, "_cache", lambda source: _raise(error))
    assert native.kernels.__wrapped__() is None


def test_nothing_is_loaded_from_where_others_can_write(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert native.kernels.__wrapped__() is None
    assert not list(cache.iterdir())


@pytest.mark.skipif(not memory.supported(), reason="no shared memory")
def test_a_segment_is_its_owners_alone() -> None:
    file = memory.create("insitu-test", 10)
    try:
        assert os.fstat(file).st_mode & 0o777 == 0o600
    finally:
        os.close(file)
