"""Paths in folders where other users may write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from foreign_user import NOBODY, needs_root

from insitu.base.disk.guarded_paths import list_folders, open_folder, open_name, read_guarded, set_mode
from insitu.base.errors import InputError


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "a" / "b"
    path.mkdir(parents=True)
    return path


def test_a_folder_that_is_swapped_stays_the_one_that_was_opened(tmp_path: Path, inner: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    with open_folder(tmp_path, inner) as opened:
        inner.rename(inner.with_name("away"))
        inner.symlink_to(private)
        (opened / "file").write_text("x")
    assert not list(private.iterdir()) and (inner.with_name("away") / "file").exists()


def test_no_link_is_followed_unless_it_is_ones_own(tmp_path: Path, inner: Path) -> None:
    link = tmp_path / "root" / "link"
    link.symlink_to(inner.parent)
    with pytest.raises(NotADirectoryError) as caught, open_folder(tmp_path, link / "b"):
        pass
    assert caught.value.filename == str(link / "b")
    with open_folder(tmp_path, link / "b", follow=True) as opened:
        assert opened.samefile(inner)
    with pytest.raises(OSError, match="symbolic links"), open_folder(tmp_path, inner / ".." / ".."):
        pass


@needs_root
def test_links_of_others_are_not_followed(tmp_path: Path, inner: Path) -> None:
    link = tmp_path / "root" / "link"
    link.symlink_to(inner.parent)
    os.chown(link, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(NotADirectoryError), open_folder(tmp_path, link / "b", follow=True):
        pass
    assert [found.name for found in list_folders(tmp_path, tmp_path / "root")] == ["a"]
    assert list_folders(tmp_path, link) == []


def test_errors_name_the_folder_and_not_its_descriptor(tmp_path: Path, inner: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, open_folder(tmp_path, inner) as opened:
        (opened / "none").rename(opened / "other")
    assert (caught.value.filename, caught.value.filename2) == (str(inner / "none"), str(inner / "other"))


def test_no_descriptor_is_left(tmp_path: Path, inner: Path) -> None:
    for folder in (inner, inner / "none", inner / ".."):
        try:
            with open_folder(tmp_path, folder, follow=True):
                pass
        except OSError:
            pass
    assert descriptors_within(tmp_path) == []


def descriptors_within(folder: Path) -> list[str]:
    """Of this process, and no others: tests before this one may have left some that go at any time."""
    paths = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [path for path in paths if Path(path).is_relative_to(folder.resolve())]


def test_a_mode_is_that_of_the_file_and_not_of_what_a_link_leads_to(tmp_path: Path, inner: Path) -> None:
    private = tmp_path / "private"
    private.touch(mode=0o600)
    (inner / "link").symlink_to(private)
    (inner / "file").touch(mode=0o600)
    folder = os.open(inner, os.O_RDONLY)
    try:
        for name in ("link", "file"):
            set_mode(folder, name, 0o660)
        with pytest.raises(NotADirectoryError):
            open_name(folder, "file", {os.geteuid()})
    finally:
        os.close(folder)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE((inner / "file").stat().st_mode) == 0o660


def test_what_others_may_write_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    path.write_text("{}")
    path.chmod(0o640)
    assert read_guarded(tmp_path, path) == b"{}"
    for mode in (0o660, 0o602):
        path.chmod(mode)
        with pytest.raises(InputError, match=rf"may write it\. Received: mode {mode:o}.*chmod go-w"):
            read_guarded(tmp_path, path)
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(InputError, match="Received: a link"):
        read_guarded(tmp_path, link)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InputError, match="Received: no regular file"):
        read_guarded(tmp_path, tmp_path / "pipe")
    with path.open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="Received: more than"):
        read_guarded(tmp_path, path)
    monkeypatch.setattr(
        "insitu.base.disk.guarded_paths.list_trusted_users", lambda home: {path.stat().st_uid + 1}
    )
    with pytest.raises(InputError, match="Received: a file of user"):
        read_guarded(tmp_path, path)
    with pytest.raises(FileNotFoundError):
        read_guarded(tmp_path, tmp_path / "none")
