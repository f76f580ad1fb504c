"""What a command reads of its caller elsewhere, as the caller packs it."""

from __future__ import annotations

import io
import json
import shutil
import sys
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner
from job_runs import Insitu

from insitu.base.errors import CacheExists, ClusterError, InputError, SourceError, StorageFull, UnknownCache
from insitu.base.paths import Paths
from insitu.cli.caller import Caller
from insitu.cli.remote import pack
from insitu.cluster import read_spec
from insitu.cluster.client import submission
from insitu.cluster.job_files import read_environment
from insitu.grid import Catalog, sweep


def read(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return Caller()


def call(given: bytes, *arguments: str) -> str:
    """Run a command as the head does for a caller. Returns its output; raises what it raises."""
    done = CliRunner().run(["--for-caller=none", *arguments], input=given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def send(*files: Path, **variables: str | None) -> bytes:
    return b"".join(pack(variables, [(str(file), file) for file in files]))


def test_files_lie_below_one_folder_by_their_paths(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").touch()
    caller = read(send(tmp_path / "a", tmp_path / "b", A=None, B="1"), monkeypatch)
    assert caller.variables == {"A": None, "B": "1"} and caller.has_files
    paths = Paths(home)
    with caller.received(paths) as (first, second):
        assert first.read_bytes() == b"x" * 3_000_000 and second.read_bytes() == b""
        root = Path(str(first).removesuffix(str(tmp_path / "a")))
        assert str(second) == f"{root}{tmp_path / 'b'}" and root.parent == paths.staging
        assert root.stat().st_mode & 0o777 == 0o700
        assert sweep(paths) == 0 and first.exists()  # an import beside it leaves it alone
    assert list(paths.staging.iterdir()) == []


def test_what_a_killed_command_has_received_is_swept(home: Path) -> None:
    from insitu.grid.catalog.orphaned_imports import host_mark

    paths = Paths(home)
    paths.staging.mkdir(parents=True)
    dead, elsewhere = (paths.trash(f"{mark}-1-1-abcd") for mark in (host_mark(), "0" * 8))
    for folder in (dead, elsewhere):
        folder.mkdir()
        (folder / "x").write_text("xx")
    assert sweep(paths) == 2 and not dead.exists() and elsewhere.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"nothing\n", "a line of JSON"),
        (b'{"variables": {"A": 1}}\n', "variables"),
        (b'{"files": [["/x", -1]]}\n', "files"),
    ],
)
def test_what_is_no_head_of_files_is_refused(
    given: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match=words):
        read(given, monkeypatch)


@pytest.mark.parametrize("name", ["/a/../../b", "..", "/x/.."])
def test_no_file_lands_outside(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = read(json.dumps({"files": [[name, 1]]}).encode() + b"\nx", monkeypatch)
    with pytest.raises(ClusterError, match=r"without `\.\.`"), caller.received(Paths(home)):
        pass
    assert list(Paths(home).staging.iterdir()) == []


def test_a_file_that_is_cut_and_a_full_disk_are_errors(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    caller = read(send(tmp_path / "a")[:-1], monkeypatch)
    with pytest.raises(ClusterError, match="without 1 bytes"), caller.received(Paths(home)):
        pass
    caller = read(send(tmp_path / "a"), monkeypatch)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(2))
    with (
        pytest.raises(StorageFull, match=r"Received: 3 B, of which 2 B are free"),
        caller.received(Paths(home)),
    ):
        pass


# Commands


def test_a_cache_is_imported_in_the_order_and_with_the_names_of_there(tmp_path: Path, home: Path) -> None:
    for number, name in enumerate(("b", "_a", "c")):
        np.save(tmp_path / f"{name}.npy", np.full(3, number))
    files = [tmp_path / f"{name}.npy" for name in ("_a", "b", "c")]
    call(send(*files), "import", "--label-from-filename", "--", "digits", "3 files")
    cache = Catalog(Paths(home)).get("digits")
    assert cache.rows == 9 and cache.labels == ("_a", "b", "c")
    assert list(Paths(home).staging.iterdir()) == []


def test_errors_name_files_as_there(tmp_path: Path, home: Path) -> None:
    broken = tmp_path / "broken.npy"
    broken.write_bytes(b"\x93NUMPY")
    with pytest.raises(SourceError) as raised:
        call(send(broken), "import", "digits", "1 files")
    assert f"{broken}" in str(raised.value) and str(home) not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), CacheExists),
        (("--append", "more"), UnknownCache),
        (("--split", "a=2"), InputError),
    ],
)
def test_an_import_that_can_not_be_reads_nothing_of_the_files(
    options: tuple[str, ...],
    error: type[InputError],
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    call(send(tmp_path / "x.npy"), "import", "digits", "1 files")
    monkeypatch.setattr(Caller, "received", None)
    name = () if "--append" in options else ("digits",)
    with pytest.raises(error):
        call(send(tmp_path / "x.npy"), "import", *options, *name, "1 files")


@pytest.fixture
def insitu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Insitu:
    found = Insitu(tmp_path)
    found.script("print('greeting')")
    monkeypatch.setenv("INSITU_HOME", str(found.paths.home))
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    return found


def test_a_job_starts_with_the_folder_and_the_variables_of_there(
    insitu: Insitu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_VARIABLE", "of the head")
    monkeypatch.setenv("B_VARIABLE", "of the head")
    with zipfile.ZipFile(tmp_path / "my job.zip", "w") as archive:
        archive.writestr("train.py", "print(1)")
    given = b"".join(
        pack({"A_VARIABLE": "1", "B_VARIABLE": None}, [("/my job.zip", tmp_path / "my job.zip")])
    )
    said = call(given, "start", "--detach", "--", "-", "my job.zip", "train.py", "--", "x")
    job = insitu.job(said.strip())
    assert job.root.name.startswith("my-job-") and read_spec(job).command == ("train.py", "--", "x")
    assert (job.code / "train.py").read_text() == "print(1)"
    variables: Any = read_environment(job).variables
    assert variables["A_VARIABLE"] == "1" and "B_VARIABLE" not in variables
    assert list(insitu.paths.staging.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [(("nothing",), UnknownCache, "nothing"), (("--node", "odd", "data/train"), InputError, "odd")],
)
def test_a_job_that_can_not_be_reads_nothing_of_the_folder(
    options: tuple[str, ...],
    error: type[InputError],
    words: str,
    insitu: Insitu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Caller, "received", None)
    with pytest.raises(error, match=words):
        call(send(), "start", *options, "job.zip", "train.py")
