"""Copies JOB_DIR, a folder or a .zip, for a job: later edits don't reach a job that runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from insitu.base.errors import JobSpecError, StorageFull

MAX_BYTES = 256 * 1024 * 1024
MAX_FILES = 20_000
IGNORED = frozenset(
    {
        *(".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
        *(".ipynb_checkpoints", ".hypothesis", ".tox", ".nox", "node_modules"),
    }
)
"""Folders of JOB_DIR that are left out, as is each one that holds a virtual environment."""


class _Budget:
    """Counts what is copied. Raises JobSpecError at the limit."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._bytes = self._count = 0

    def add_entry(self) -> None:
        """Count a file or a folder."""
        self._count += 1
        if self._count > MAX_FILES:
            raise self._make_limit_error(f"more than {MAX_FILES} files and folders")

    def add_bytes(self, count: int) -> None:
        self._bytes += count
        if self._bytes > MAX_BYTES:
            raise self._make_limit_error(f"more than {MAX_BYTES // 2**20} MiB")

    def _make_limit_error(self, what: str) -> JobSpecError:
        return JobSpecError(
            f"JOB_DIR {self._source} holds {what}. It is copied for each job, so it should hold code alone: "
            f"put data into a cache with `insitu import`, and scripts into a folder of their own."
        )


def copy_code(source: Path, destination: Path, leave_out: Path) -> None:
    """Copy `source` to `destination`, which is made. `leave_out`, insitu's own home, is never copied.

    Raises JobSpecError; then `destination` may be half-made.
    """
    _check_source(source)
    destination.mkdir()
    if source.is_dir():
        _copy_folder(source, destination, _Budget(source), leave_out.resolve(), (source.resolve(),))
    else:
        _extract(source, destination)


@contextlib.contextmanager
def open_code(source: Path) -> Iterator[Path]:
    """Yield a folder with what JOB_DIR holds: JOB_DIR itself, or one with the files of a .zip.

    Raises JobSpecError.
    """
    _check_source(source)
    if source.is_dir():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="insitu-code-") as folder:
        _extract(source, Path(folder))
        yield Path(folder)


def _check_source(source: Path) -> None:
    """Raise JobSpecError for what can't be JOB_DIR."""
    if source.resolve() in (Path("/"), Path(os.path.expanduser("~")).resolve()):
        raise JobSpecError(
            "JOB_DIR is copied for each job, so it can't be the root or the home folder: put the script into "
            f"a folder of its own and name that. Received: {source}"
        )
    if not source.exists():
        raise JobSpecError(f"JOB_DIR {source} doesn't exist")
    if not source.is_dir() and not (source.is_file() and source.suffix == ".zip"):
        raise JobSpecError(f"JOB_DIR must be a folder or a .zip file. Received: {source}")


def pack_code(source: Path, folder: Path, leave_out: Path) -> Path:
    """Return a .zip of JOB_DIR: the file itself if it is one, else one that is made in `folder`, an empty
    one. It holds what `copy_code` copies.

    Raises JobSpecError, StorageFull.
    """
    if not source.is_dir() and source.suffix == ".zip" and source.is_file():
        _check_size(source, source.stat().st_size)
        if not zipfile.is_zipfile(source):
            raise JobSpecError(f"JOB_DIR {source} isn't a .zip file that can be read")
        return source
    code, archive = folder / "code", folder / "job.zip"
    try:
        copy_code(source, code, leave_out)
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as packed:
            for path in sorted(code.rglob("*")):
                packed.write(path, path.relative_to(code))
    except UnicodeEncodeError as error:
        raise JobSpecError(
            f"Names of files in JOB_DIR {source} must be text to be sent. Received: {error.object!r}. "
            f"Rename it"
        ) from error
    except OSError as error:
        raise StorageFull(
            f"A .zip of JOB_DIR {source} is made in {folder} to be sent. Received: {error}. Make room there, "
            f"or set TMPDIR to another folder"
        ) from error
    shutil.rmtree(code)
    _check_size(source, archive.stat().st_size)
    return archive


def _check_size(source: Path, size: int) -> None:
    if size > MAX_BYTES:
        raise JobSpecError(
            f"JOB_DIR {source} has {MAX_BYTES >> 20} MiB at most as a .zip. Received: {size >> 20} MiB. Put "
            f"data into a cache with `insitu import`"
        )


def _copy_folder(
    source: Path, destination: Path, budget: _Budget, leave_out: Path, above: tuple[Path, ...]
) -> None:
    """Copy a folder. Links are followed; one that leads back to a folder it is in is refused."""
    for entry in _list_entries(source):
        path = Path(entry.path)
        if entry.is_dir():
            real = path.resolve()
            if entry.name in IGNORED or (path / "pyvenv.cfg").exists() or real == leave_out:
                continue
            if real in above:
                raise JobSpecError(f"{path} of JOB_DIR is a link to a folder that it is in")
            budget.add_entry()
            (destination / entry.name).mkdir()
            _copy_folder(path, destination / entry.name, budget, leave_out, (*above, real))
        elif entry.is_file():
            budget.add_entry()
            try:
                _copy_file(path, destination / entry.name, budget)
            except PermissionError as error:
                raise JobSpecError(f"{path} of JOB_DIR can't be read: {error.strerror}") from error
        else:
            kind = "a link to nothing" if entry.is_symlink() else "neither a file nor a folder"
            raise JobSpecError(f"{path} of JOB_DIR is {kind}; it can't be copied")


def _copy_file(source: Path, destination: Path, budget: _Budget) -> None:
    """Copy a file with its mode and times. Its bytes are counted as they come: it may grow, and files such as
    those of /proc have no size."""
    with source.open("rb") as original, destination.open("xb") as copy:
        while chunk := original.read(1 << 20):
            budget.add_bytes(len(chunk))
            copy.write(chunk)
    shutil.copystat(source, destination)


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except PermissionError as error:
        raise JobSpecError(f"{folder} of JOB_DIR can't be read: {error.strerror}") from error


def _extract(archive: Path, destination: Path) -> None:
    budget = _Budget(archive)
    try:
        with zipfile.ZipFile(archive) as opened:
            for entry, name in list(_check_entries(opened, archive)):
                target = destination / name
                if entry.is_dir():
                    _make_folders(target, destination, budget)
                    continue
                budget.add_entry()
                _make_folders(target.parent, destination, budget)
                with opened.open(entry) as packed, target.open("xb") as unpacked:
                    # Counted as they come: the sizes that an archive declares can't be trusted.
                    while chunk := packed.read(1 << 20):
                        budget.add_bytes(len(chunk))
                        unpacked.write(chunk)
                if entry.external_attr >> 16 & 0o111:
                    target.chmod(target.stat().st_mode | 0o111)
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise JobSpecError(f"JOB_DIR {archive} isn't a .zip file that can be read: {error}") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise JobSpecError(f"JOB_DIR {archive} holds {error.filename} twice") from error


def _make_folders(folder: Path, root: Path, budget: _Budget) -> None:
    """Make `folder` below `root`, and those above it, each of which counts."""
    here = root
    for name in folder.relative_to(root).parts:
        here = here / name
        if not here.is_dir():
            budget.add_entry()
            here.mkdir()


def _check_entries(opened: zipfile.ZipFile, archive: Path) -> Iterator[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """Yield each entry with its name, known to stay inside. Raises JobSpecError before any is written."""
    for entry in opened.infolist():
        name = PurePosixPath(entry.filename)
        mode = entry.external_attr >> 16
        if name.is_absolute() or ".." in name.parts or "\\" in entry.filename or "\0" in entry.filename:
            raise JobSpecError(
                f"JOB_DIR {archive} holds an entry that would land outside: {entry.filename!r}"
            )
        if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise JobSpecError(f"JOB_DIR {archive} holds a link or special file: {entry.filename!r}")
        if entry.flag_bits & 1:
            raise JobSpecError(f"JOB_DIR {archive} is encrypted: {entry.filename!r}")
        if not set(name.parts) & IGNORED:
            yield entry, name
