"""Files that all tasks write: which come to the job's folder, and what each task reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.base.disk.written_once import WrittenFiles


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    for task in ("worker-0", "worker-1", "worker-2"):
        (tmp_path / "tasks" / task).mkdir(parents=True)
    return tmp_path


def files_of(job: Path, index: int) -> WrittenFiles:
    own = str(job / "tasks" / f"worker-{index}" / "files") if index else None
    return WrittenFiles((str(job / "code"),), str(job / "code.written"), str(job / "tasks"), own)


def write(files: WrittenFiles, path: Path, text: str, mode: str = "w") -> None:
    with files.open(path, mode) as file:
        file.write(text)


def read(files: WrittenFiles, path: Path) -> str:
    with files.open(path) as file:
        return str(file.read())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mode", ["w", "a"])
def test_the_chief_writes_whoever_comes_first(job: Path, first: int, mode: str) -> None:
    path = job / "code" / "log.txt"
    files = {index: files_of(job, index) for index in (0, 1)}
    for index in (first, 1 - first):
        write(files[index], path, f"of {index}\n", mode)
    assert path.read_text() == "of 0\n"
    assert read(files[0], path) == "of 0\n"
    assert read(files[1], path).endswith("of 1\n")  # what it has written itself
    write(files[0], path, "more\n", "a")
    write(files[1], path, "more\n", "a")
    assert path.read_text() == "of 0\nmore\n"


def test_a_file_of_one_task_is_there_for_all_once_it_is_closed(job: Path) -> None:
    path = job / "code" / "part-1.txt"
    files = files_of(job, 1)
    opened = files.open(path, "w", buffering=1)
    opened.write("half\n")
    assert not path.exists()
    opened.write("whole\n")
    opened.close()
    assert path.read_text() == "half\nwhole\n" == read(files_of(job, 0), path)
    write(files, path, "again\n", "a")
    assert path.read_text() == "half\nwhole\nagain\n"


def test_a_file_that_was_there_is_the_chiefs(job: Path) -> None:
    path = job / "code" / "config.json"
    path.write_text("shipped\n")
    write(files_of(job, 1), path, "added\n", "a")
    assert path.read_text() == "shipped\n"
    assert read(files_of(job, 1), path) == "shipped\nadded\n"


def test_a_worker_reads_what_the_chief_alone_has_written(job: Path) -> None:
    path = job / "code" / "vocabulary.txt"
    write(files_of(job, 0), path, "a b c")
    assert read(files_of(job, 1), path) == "a b c"


def test_files_are_renamed_and_removed_where_they_are(job: Path) -> None:
    files, code = files_of(job, 1), job / "code"
    for number in range(2):
        write(files, code / "state-1.tmp", f"{number}")
        files.rename(os.replace, code / "state-1.tmp", code / "state-1.txt")
        assert [path.name for path in code.iterdir()] == ["state-1.txt"]
        assert (code / "state-1.txt").read_text() == f"{number}" == read(files, code / "state-1.txt")
    write(files_of(job, 0), code / "model.tmp", "chief")
    write(files, code / "model.tmp", "other")
    files.rename(os.rename, code / "model.tmp", code / "model.txt")
    assert (code / "model.tmp").read_text() == "chief" and read(files, code / "model.txt") == "other"
    files.remove(code / "model.txt")
    files.remove(code / "state-1.txt")
    assert not (code / "state-1.txt").exists()


def test_what_is_elsewhere_or_exclusive_stays_as_it_is(job: Path) -> None:
    files = files_of(job, 1)
    write(files, job / "elsewhere.txt", "here")
    assert (job / "elsewhere.txt").read_text() == "here"
    write(files, job / "code" / "lock", "mine", "x")
    with pytest.raises(FileExistsError):
        files_of(job, 2).open(job / "code" / "lock", "x")
    for mode in ("w", "r+"):
        with pytest.raises(FileNotFoundError, match="missing/file"):
            files.open(job / "code" / "missing" / "file", mode)
    assert not (job / "tasks" / "worker-1" / "files").exists()


@pytest.mark.parametrize("mode", ["wb", "w+b", "w", "w+"])
def test_files_are_of_the_kind_that_open_returns(job: Path, mode: str) -> None:
    for buffering in (-1, 1, 64, 0):
        if (buffering == 0 and "b" not in mode) or (buffering == 1 and "b" in mode):
            continue
        expected = open(job / "plain", mode, buffering)  # noqa: SIM115
        opened = files_of(job, 1).open(job / "code" / "file", mode, buffering)
        assert opened.writable() and opened.readable() == expected.readable()
        assert isinstance(opened, type(expected)) and opened.mode == expected.mode
        opened.close()
        expected.close()


def test_a_task_that_begins_again_forgets_what_it_has_not_published(job: Path) -> None:
    code = job / "code"
    write(files_of(job, 0), code / "model", "chief")
    write(files_of(job, 1), code / "model", "other")
    write(files_of(job, 1), code / "part-1", "first")
    again = files_of(job, 1)
    kept = again.open(code / "log", "w")
    again.clear()
    assert read(again, code / "model") == "chief"
    write(again, code / "part-1", "second")
    assert (code / "part-1").read_text() == "second"
    kept.close()
    assert (code / "log").exists()
