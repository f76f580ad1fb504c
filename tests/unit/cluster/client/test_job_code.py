"""The job's own copy of JOB_DIR, from folders and archives, also hostile ones."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from insitu.base.errors import JobSpecError, StorageFull
from insitu.cluster.client import job_code as code
from insitu.cluster.client.job_code import copy_code, pack_code


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(source: Path) -> Path:
        copy_code(source, tmp_path / "copy", tmp_path / "home")
        return tmp_path / "copy"

    return copy


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def folder_with(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def archive(path: Path, entries: dict[str, bytes], mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in entries.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = mode << 16
            opened.writestr(entry, data)
    return path


def test_a_folder_is_copied_without_what_is_no_code(tmp_path: Path, copied: Callable[[Path], Path]) -> None:
    source = folder_with(
        tmp_path / "job",
        "train.py",
        "lib/a.py",
        ".git/config",
        "lib/__pycache__/a.pyc",
        "env/pyvenv.cfg",
        "env/x.py",
    )
    (source / "train.py").chmod(0o755)
    copy = copied(source)
    assert names(copy) == ["lib/a.py", "train.py"]
    assert os.access(copy / "train.py", os.X_OK)


def test_insitu_home_inside_the_folder_is_left_out(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "job", "train.py", "home/jobs/x/code/train.py")
    (source / "home" / "jobs" / "new").mkdir()
    copy_code(source, source / "home" / "jobs" / "new" / "code", source / "home")
    assert names(source / "home" / "jobs" / "new" / "code") == ["train.py"]


def test_links_are_followed(tmp_path: Path, copied: Callable[[Path], Path]) -> None:
    folder_with(tmp_path / "shared", "util.py")
    source = folder_with(tmp_path / "job", "train.py")
    (source / "util.py").symlink_to(tmp_path / "shared" / "util.py")
    (source / "shared").symlink_to(tmp_path / "shared")
    copy = copied(source)
    assert names(copy) == ["shared/util.py", "train.py", "util.py"]
    assert not (copy / "util.py").is_symlink()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda job: (job / "loop").symlink_to(job), "a folder that it is in"),
        (lambda job: (job / "gone").symlink_to(job / "nothing"), "a link to nothing"),
        (lambda job: os.mkfifo(job / "pipe"), "neither a file nor a folder"),
    ],
)
def test_what_cannot_be_copied_is_named(
    tmp_path: Path, copied: Callable[[Path], Path], make: Callable[[Path], object], message: str
) -> None:
    source = folder_with(tmp_path / "job", "train.py")
    make(source)
    with pytest.raises(JobSpecError, match=message):
        copied(source)


def test_too_much_data_is_refused(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_BYTES", 2**20)
    source = folder_with(tmp_path / "job", "train.py")
    (source / "data.bin").write_bytes(bytes(2**20))
    with pytest.raises(JobSpecError, match=r"more than 1 MiB.*insitu import"):
        copied(source)


def test_too_many_files_are_refused(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 2)
    with pytest.raises(JobSpecError, match="more than 2 files"):
        copied(folder_with(tmp_path / "job", "a", "b", "c"))


def test_an_archive_is_unpacked(tmp_path: Path, copied: Callable[[Path], Path]) -> None:
    path = archive(
        tmp_path / "job.zip", {"train.py": b"1", "lib/": b"", "lib/run.sh": b"2"}, stat.S_IFREG | 0o755
    )
    copy = copied(path)
    assert names(copy) == ["lib/run.sh", "train.py"]
    assert os.access(copy / "lib/run.sh", os.X_OK)


@pytest.mark.parametrize(
    "name", ["../evil.py", "a/../../evil.py", "/tmp/evil.py", "..\\evil.py", "C:\\evil.py", "a/.."]
)
def test_an_entry_that_would_land_outside_is_refused(
    tmp_path: Path, copied: Callable[[Path], Path], name: str
) -> None:
    path = archive(tmp_path / "job.zip", {"train.py": b"1", name: b"evil"})
    with pytest.raises(JobSpecError, match="would land outside"):
        copied(path)
    assert names(tmp_path / "copy") == [] and not (tmp_path / "evil.py").exists()


def test_a_link_in_an_archive_is_refused(tmp_path: Path, copied: Callable[[Path], Path]) -> None:
    with pytest.raises(JobSpecError, match="a link or special file"):
        copied(archive(tmp_path / "job.zip", {"link": b"/etc/passwd"}, stat.S_IFLNK | 0o777))


def test_an_archive_that_swells_is_stopped(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_BYTES", 2**20)
    path = archive(tmp_path / "job.zip", {"bomb": bytes(4 * 2**20)})
    assert path.stat().st_size < 2**20
    with pytest.raises(JobSpecError, match="more than 1 MiB"):
        copied(path)


@pytest.mark.parametrize("names", [[f"{i}/" for i in range(11)], ["/".join("abcdefghijk") + "/train.py"]])
def test_folders_of_an_archive_count_too(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """25,000 of them in 2 MB passed the limit of 20,000 files."""
    monkeypatch.setattr(code, "MAX_FILES", 10)
    path = archive(tmp_path / "job.zip", dict.fromkeys(names, b""))
    with pytest.raises(JobSpecError, match="more than 10 files and folders"):
        copied(path)


def test_folders_count_too(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 4)
    (tmp_path / "job" / "a" / "b" / "c" / "d" / "e").mkdir(parents=True)
    with pytest.raises(JobSpecError, match="more than 4 files and folders"):
        copied(tmp_path / "job")


def test_a_file_is_counted_by_what_is_read_of_it(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of /proc say that they are empty."""
    monkeypatch.setattr(code, "MAX_BYTES", 100)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "link").symlink_to("/proc/self/maps")
    with pytest.raises(JobSpecError, match="more than 0 MiB"):
        copied(tmp_path / "job")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_comes_twice_is_refused(tmp_path: Path, copied: Callable[[Path], Path]) -> None:
    path = tmp_path / "job.zip"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("train.py", "1")
        opened.writestr("train.py", "2")
    with pytest.raises(JobSpecError, match="twice"):
        copied(path)


def test_a_broken_archive_is_refused(tmp_path: Path, copied: Callable[[Path], Path]) -> None:
    whole = archive(tmp_path / "whole.zip", {"train.py": b"print()" * 100}).read_bytes()
    path = tmp_path / "job.zip"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JobSpecError, match=r"isn't a \.zip file that can be read"):
        copied(path)


@pytest.mark.parametrize(("name", "message"), [("job.tar", "folder or a .zip"), ("nothing", "doesn't exist")])
def test_neither_folder_nor_archive(
    tmp_path: Path, copied: Callable[[Path], Path], name: str, message: str
) -> None:
    (tmp_path / "job.tar").write_bytes(b"")
    with pytest.raises(JobSpecError, match=message):
        copied(tmp_path / name)


@pytest.mark.parametrize("source", ["/", "/tmp/..", "{home}", "{home}/sub/.."])
def test_neither_the_root_nor_the_home_folder_is_copied(
    tmp_path: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    home = folder_with(tmp_path / "me", "train.py", "sub/a.py")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(JobSpecError, match=r"can't be the root or the home folder.*folder of its own"):
        copied(Path(source.format(home=home)))
    assert not (tmp_path / "copy").exists()
    assert names(copied(home / "sub")) == ["a.py"]


def test_a_packed_folder_unpacks_to_what_is_copied(tmp_path: Path) -> None:
    source, there = tmp_path / "job", tmp_path / "there"
    (source / "empty").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "train.py").write_text("print(1)")
    (source / "train.py").chmod(0o755)
    os.utime(source / "train.py", (0, 0))  # before a .zip can say it
    (tmp_path / "made").mkdir()
    archive = pack_code(source, tmp_path / "made", tmp_path)
    assert list((tmp_path / "made").iterdir()) == [archive]
    copy_code(archive, there, tmp_path)
    assert sorted(each.name for each in there.iterdir()) == ["empty", "train.py"]
    assert (there / "train.py").stat().st_mode & 0o111
    assert pack_code(archive, tmp_path / "other", tmp_path) == archive


def test_what_can_not_be_packed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "job"
    source.mkdir()
    (source / "train.py").write_bytes(os.urandom(5000))
    with pytest.raises(StorageFull, match="set TMPDIR"):
        pack_code(source, tmp_path / "missing", tmp_path)
    (tmp_path / "made").mkdir()
    archive = pack_code(source, tmp_path / "made", tmp_path)
    monkeypatch.setattr(code, "MAX_BYTES", 4000)
    with pytest.raises(JobSpecError, match=r"as a \.zip"):
        pack_code(archive, tmp_path, tmp_path)
    monkeypatch.undo()
    (source / os.fsdecode(b"\xff.py")).touch()
    (tmp_path / "again").mkdir()
    with pytest.raises(JobSpecError, match="must be text"):
        pack_code(source, tmp_path / "again", tmp_path)
