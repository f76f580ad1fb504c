"""Files behind URLs, from a local server and fsspec's file systems in memory and on the disk."""

from __future__ import annotations

import io
from pathlib import Path

import fsspec
import numpy as np
import pytest

from insitu.errors import SourceError
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
    for name in ("b.npy", "a.npy", "_c.npy", "sub/d.npy", ".git/e.npy", "notes.txt"):
        put("/expanded", name, np.arange(3))
    names = [str(path) for path, _ in find_sources(["memory://expanded"], None)]
    assert [name.partition("expanded/")[2] for name in names] == ["a.npy", "b.npy", "sub/d.npy"]
    assert len(find_sources(["memory://expanded/*.npy", "memory://expanded/a.npy"], None)) == 3
    with pytest.raises(SourceError, match="No file matches memory://expanded/x"):
        find_sources(["memory://expanded/x*"], None)
    with pytest.raises(SourceError, match="doesn't exist"):
        find_sources(["memory://expanded/x.npy"], None)
    with pytest.raises(SourceError, match=r"The format of .*notes.txt is unknown"):
        find_sources(["memory://expanded/notes.txt"], None)


def test_paths_and_urls_are_imported_one_at_a_time(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    with pytest.raises(SourceError, match=r"The sources are paths or URLs. Received: both"):
        find_sources([str(tmp_path / "a.npy"), put("/both", "b.npy", np.arange(3))], None)
    assert not is_url(str(tmp_path / "a.npy")) and is_url(f"file://{tmp_path}/a.npy")
    ((file, format),) = find_sources([f"file://{tmp_path}/a.npy"], None)
    assert format == "npy" and lies_behind_url(file) and not lies_behind_url(tmp_path)
    assert arrow_input(tmp_path) == tmp_path and arrow_input(file).read(6) == b"\x93NUMPY"


def test_an_array_in_column_order_is_refused() -> None:
    with pytest.raises(SourceError, match="An array behind a URL must lie in row order"):
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
    url = put("/failing", "a.npy", np.arange(3))

    class Refuses:
        def open(self, *_: object, **__: object) -> None:
            raise RuntimeError(f"403 for {url}?key=SECRET")

    monkeypatch.setattr(urls, "connect", lambda _: (Refuses(), "a"))
    with pytest.raises(OSError, match=r"RuntimeError: 403 for .*a.npy") as refused:
        UrlFile(f"{url}?key=SECRET").open()
    assert "SECRET" not in str(refused.value)
