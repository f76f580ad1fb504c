"""Files behind URLs, from a local server and fsspec's file systems in memory and on the disk."""

from __future__ import annotations

import io
import logging
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import fsspec
import numpy as np
import pytest

from insitu.base.errors import SourceError
from insitu.grid.sources import SourceOptions, find_sources, open_sources, urls
from insitu.grid.sources.urls import UrlFile, arrow_input, is_url, lies_behind_url


def put(folder: str, name: str, array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    fsspec.filesystem("memory").pipe(f"{folder}/{name}", buffer.getvalue())
    return f"memory:/{folder}/{name}"


def test_a_url_is_read_in_pieces_from_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "PIECE_BYTES", 1000)
    rows = np.arange(5000)
    file = UrlFile(put("/pieces", "a.npy", rows))
    assert (file.name, file.suffix) == ("a.npy", ".npy")
    assert file.stat().st_size == rows.nbytes + 128
    with file.open() as opened:
        opened.seek(128 + 8 * 4000)
        assert np.frombuffer(opened.read(80), np.int64).tolist() == list(range(4000, 4010))
        assert opened.tell() == 128 + 8 * 4010
    (source,) = open_sources(find_sources([file.url], None), SourceOptions())
    blocks = list(source.blocks(8000, 100))
    assert np.concatenate([block.columns["x"] for block in blocks]).tolist() == list(range(100, 5000))


def test_globs_and_folders_are_expanded_without_hidden_files() -> None:
    for name in ("b.npy", "a.npy", "_c.npy", "sub/d.npy", ".git/e.npy", "notes.md"):
        put("/expanded", name, np.arange(3))
    names = [str(path) for path, _ in find_sources(["memory://expanded"], None)]
    assert [name.partition("expanded/")[2] for name in names] == ["a.npy", "b.npy", "sub/d.npy"]
    assert len(find_sources(["memory://expanded/*.npy", "memory://expanded/a.npy"], None)) == 3
    with pytest.raises(SourceError, match="No file matches memory://expanded/x"):
        find_sources(["memory://expanded/x*"], None)
    with pytest.raises(SourceError, match="doesn't exist"):
        find_sources(["memory://expanded/x.npy"], None)
    with pytest.raises(SourceError, match=r"The format of .*notes.md is unknown"):
        find_sources(["memory://expanded/notes.md"], None)


def test_paths_and_urls_are_imported_one_at_a_time(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(SourceError, match=r"The sources are paths or URLs. Received: both"):
        find_sources([str(tmp_path / "a.npy"), put("/both", "b.npy", np.arange(3))], None)
    assert not is_url(str(tmp_path / "a.npy")) and is_url(f"file://{tmp_path}/a.npy")
    ((file, format),) = find_sources([f"file://{tmp_path}/a.npy"], None)
    assert format == "npy" and lies_behind_url(file) and not lies_behind_url(tmp_path)
    assert arrow_input(tmp_path) == tmp_path and arrow_input(file).read(6) == b"\x93NUMPY"


def test_an_array_in_column_order_is_refused() -> None:
    with pytest.raises(SourceError, match="An array behind a URL must be in row order"):
        open_sources(
            find_sources([put("/columns", "a.npy", np.ones((4, 4), order="F"))], None), SourceOptions()
        )


def test_what_a_url_hides_is_in_no_message() -> None:
    file = UrlFile("nosuch://host/a.csv?signature=SECRET")
    assert "SECRET" not in str(file)
    with pytest.raises(SourceError) as refused:
        file.open()
    assert "SECRET" not in str(refused.value) and "fsspec knows" in str(refused.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(SourceError, match=r"Received: s3://b/a.csv, .* on each node, `pip install s3fs`"):
        find_sources(["s3://b/a.csv"], None)


def test_what_a_package_raises_is_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_PAUSES", (0.0, 0.0, 0.0))
    url = put("/failing", "a.npy", np.arange(3))

    class Refuses:
        def open(self, *_: object, **__: object) -> None:
            raise RuntimeError(f"403 for {url}?key=SECRET")

    monkeypatch.setattr(urls, "connect", lambda _: (Refuses(), "a"))
    with pytest.raises(OSError, match=r"RuntimeError: 403 for .*a.npy") as refused:
        UrlFile(f"{url}?key=SECRET").open()
    assert "SECRET" not in str(refused.value)


class Flaky:
    """A file of fsspec whose reads fail some times, as those of a server that is cut off."""

    def __init__(self, data: bytes, failures: int, error: Exception) -> None:
        self.size, self.opened = len(data), 0
        self._data, self._left, self._error = data, failures, error
        self._place = 0

    def open(self, *_: object, **__: object) -> Flaky:
        self.opened += 1
        return self

    def seek(self, offset: int) -> None:
        """Return nothing, as hdfs-native."""
        self._place = offset

    def read(self, size: int) -> bytes:
        if self._left:
            self._left -= 1
            raise self._error
        return self._data[self._place : self._place + size]

    def close(self) -> None:
        self._place = -1


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "_PAUSES", (0, 0, 0))


def test_a_piece_that_does_not_come_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    flaky = Flaky(b"0123456789", 3, RuntimeError("cut"))
    monkeypatch.setattr(urls, "connect", lambda _: (flaky, "a"))
    with UrlFile("x://a").open() as opened:
        assert opened.seek(4) == 4 and opened.read(3) == b"456" and opened.seek(-2, 2) == 8
        assert opened.read() == b"89" and opened.tell() == 10
    assert flaky.opened == 4
    flaky = Flaky(b"0123456789", 4, RuntimeError("cut"))
    with UrlFile("x://a").open() as opened, pytest.raises(OSError, match="RuntimeError: cut"):
        opened.read()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError("bucket/a"), "it isn't there"),
        (PermissionError("no right"), "no right"),
        (ValueError("doesn't appear to support range requests."), "gives whole files alone .*import it from"),
    ],
)
def test_what_another_try_does_not_change_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    flaky = Flaky(b"0123456789", 1, error)
    monkeypatch.setattr(urls, "connect", lambda _: (flaky, "a"))
    with UrlFile("x://a").open() as opened, pytest.raises(OSError, match=message):
        opened.read()


def test_a_server_that_names_no_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(b"", 0, OSError())
    flaky.size = None  # type: ignore[assignment]
    monkeypatch.setattr(urls, "connect", lambda _: (flaky, "a"))
    with pytest.raises(OSError, match="whole files alone"):
        UrlFile("x://a").open()


def test_no_secret_of_a_url_is_in_what_a_package_says(
    monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    file = UrlFile("https://me:PASS%20WORD@host/a.npy?sig=SECRET%2B")
    assert str(file) == "https://me@host/a.npy"
    for error in (OSError, PermissionError, RuntimeError):
        for text in (file.url, "sig=SECRET+ of PASS WORD", "https://host/a.npy?sig=SECRET%2B"):
            flaky = Flaky(b"0", 9, error(f"can't get {text}"))
            monkeypatch.setattr(urls, "connect", lambda _, flaky=flaky: (flaky, "a"))
            with file.open() as opened, pytest.raises(OSError, match="can't get") as refused:
                opened.read()
            assert "SECRET" not in str(refused.value) and "WORD" not in str(refused.value)
            assert error is RuntimeError or refused.type is error


def test_a_server_that_fails_is_not_said_to_have_no_such_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Down:
        error: Exception = RuntimeError("no answer")

        def isdir(self, path: str) -> bool:
            return False

        def info(self, path: str) -> None:
            raise self.error

    monkeypatch.setattr(urls, "connect", lambda _: (Down(), "a"))
    with pytest.raises(SourceError, match=r"x://a can't be read: RuntimeError: no answer"):
        urls.expand_url("x://a")
    refused = type("ClientConnectorCertificateError", (Exception,), {"__module__": "aiohttp.client"})(
        "no trust"
    )
    missing = FileNotFoundError("a")
    missing.__cause__ = refused
    monkeypatch.setattr(Down, "error", missing)
    with pytest.raises(SourceError, match=r"x://a can't be read: ClientConnectorCertificateError: no trust"):
        urls.expand_url("x://a")
    monkeypatch.setattr(Down, "error", FileNotFoundError("a"))
    with pytest.raises(SourceError, match=r"x://a doesn't exist, or this host's credentials"):
        urls.expand_url("x://a")


def test_what_a_package_logs_is_not_printed_by_itself() -> None:
    urls.connect("memory://a")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("fsspec").handlers)


class Says:
    """A file system that says one thing of every file."""

    protocol = ("abc",)

    def __init__(self, **found: object) -> None:
        self._found = {"size": 3, "type": "file", **found}

    def invalidate_cache(self) -> None:
        """Forget nothing."""

    def info(self, path: str) -> dict[str, object]:
        return self._found


def test_a_file_has_the_same_state_on_all_hosts_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(**found: object) -> tuple[int, int]:
        monkeypatch.setattr(urls, "connect", lambda _: (Says(**found), "a"))
        seen = UrlFile("abc://a").stat()
        return seen.st_size, seen.st_mtime_ns

    then = datetime(2026, 1, 1, tzinfo=UTC)
    there = then.astimezone(timezone(timedelta(hours=9)))
    assert state(LastModified=then, ETag="x") == state(LastModified=there, ETag="x")
    # Servers say seconds, so another version may have the same time.
    assert state(LastModified=then, ETag="x") != state(LastModified=then, ETag="y")
    assert state(modificationTime=1000) != state(modificationTime=1001)
    assert state(modification_time=1000) != state(modification_time=1001)
    assert state() == (3, 0)


def test_the_files_of_a_folder_keep_the_server_and_user_of_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    class WebHdfs:
        def glob(self, path: str) -> list[str]:
            return ["/d/a.npy"]

        def isfile(self, path: str) -> bool:
            return True

        def unstrip_protocol(self, path: str) -> str:
            return f"webhdfs://{path}"

    monkeypatch.setattr(urls, "connect", lambda _: (WebHdfs(), "/d/*.npy"))
    (file,), _ = urls.expand_url("webhdfs://me@host:9870/d/*.npy")
    assert file.url == "webhdfs://me@host:9870/d/a.npy"
