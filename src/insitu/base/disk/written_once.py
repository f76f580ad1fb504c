"""Have what all tasks of a job write to the job's folder written once, as if one process had run the script.

Replicas run the same script, so they write the same files. The chief writes to the job's folder. Another
worker writes to a place of its own, which it also reads from. Each of its files that the chief doesn't write
is published to the job's folder, whole, when it is closed: `part-1.npy` is there for all.

Python's `open`, and what is written by it, is treated so, and HDF5, `torch.save` and renames. Exclusive
creation (`x`) stays as it is: by it tasks agree on who does something.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

from insitu.base.context import Context
from insitu.base.process.import_hooks import call_after_import

_ELSEWHERE = "~elsewhere"
"""The folder among a task's own files for those that don't belong into the job's folder."""
_MODES = ("w", "a", "+")
_open = io.open
_rename, _replace, _remove = os.rename, os.replace, os.remove
_installed: list[WrittenFiles] = []


def install_written_once(context: Context) -> None:
    """Treat files that this process writes as the module says, if it is a task that trains. Done once."""
    if _installed or context.job is None or context.role not in ("chief", "worker"):
        return
    job = context.job
    tasks = os.path.realpath(job.tasks)
    own = None if context.is_chief else os.path.realpath(job.own_files(context.task))
    roots = (os.path.abspath(job.code), os.path.realpath(job.code))
    files = WrittenFiles(roots, os.path.realpath(job.written_files), tasks, own)
    _installed.append(files)
    builtins.open = io.open = files.open
    if own is not None:
        os.rename = functools.partial(files.rename, _rename)
        os.replace = functools.partial(files.rename, _replace)
        os.remove = os.unlink = files.remove
    call_after_import("h5py", functools.partial(_treat_hdf5, files))
    call_after_import("torch", functools.partial(_treat_torch, files))


def find_written_files() -> WrittenFiles | None:
    """Return how this process writes files of the job's folder; None outside a job."""
    return _installed[0] if _installed else None


class WrittenFiles:
    """The files that one task writes to the job's folder."""

    def __init__(self, roots: tuple[str, ...], written: str, tasks: str, own: str | None) -> None:
        #: The job's folder, by each of its names.
        self._roots = tuple(dict.fromkeys(roots))
        #: The file with the names that the chief has written, each ended by a zero byte.
        self._written = written
        #: The folder with one for each task, in which its own files are.
        self._tasks = tasks
        #: The folder for this task's files; None in the chief.
        self._own = own
        #: Names that are known to be in `_written`.
        self._known: set[str] = set()
        #: The paths of own files that are being written. They are published when they are closed.
        self._writing: set[str] = set()

    @property
    def is_chief(self) -> bool:
        return self._own is None

    def clear(self) -> None:
        """Remove what this task has written beside the job's folder, but for what is still being written."""
        for folder, _, names in os.walk(self._own or ""):
            for path in (os.path.join(folder, name) for name in names):
                if path not in self._writing and os.stat(path).st_nlink == 1:
                    _remove(path)

    # Names

    def name_of(self, file: Any) -> str | None:
        """Return a file's name in the job's folder; None for one elsewhere, and what isn't a path."""
        if isinstance(file, int):
            return None
        try:
            path = os.path.abspath(os.fsdecode(file))
        except (TypeError, ValueError):
            return None
        return next((path[len(r) + 1 :] for r in self._roots if path.startswith(r + os.sep)), None)

    def _shared(self, name: str) -> str:
        return os.path.join(self._roots[0], name)

    def _private(self, name: str) -> str:
        return os.path.join(self._own or "", name)

    @contextlib.contextmanager
    def _names_of_chief(self) -> Iterator[Any]:
        """While open, no other task changes which names the chief has written. Yields their file."""
        with _open(self._written, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            self._known = set(os.fsdecode(file.read()).split("\0"))
            yield file

    def own_folder(self, path: Any) -> str:
        """Return the path to which a task other than the chief writes a folder, whatever its parent."""
        name = self.name_of(path)
        full = os.path.abspath(os.fsdecode(path))
        return self._private(name) if name is not None else self._private(_ELSEWHERE + full)

    # Opening

    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open a file as Python's `open`."""
        name = self.name_of(file) if opener is None else None
        if name is not None and isinstance(mode, str):
            if any(letter in mode for letter in _MODES) and "x" not in mode:
                place = self.begin_writing(name, mode)
                if place is not None:
                    raw = _OwnFile(place, mode, functools.partial(self.end_writing, name))
                    return _wrap(raw, mode, buffering, encoding, errors, newline)
            else:
                file = self.reading_place(name) or file
        return _open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def reading_place(self, name: str) -> str | None:
        """Return the path of this task's own file of that name; None if it has written none."""
        place = self._private(name)
        return place if self._own is not None and os.path.isfile(place) else None

    def begin_writing(self, name: str, mode: str) -> str | None:
        """Return the path to write a file to; None: that of the job's folder. `mode` is that of `open`."""
        if self._own is None:
            self._claim(name, keeps="r" in mode)
            return None
        shared, place = self._shared(name), self._private(name)
        # Asked once: the chief may rename or remove it meanwhile.
        there = _stat(shared)
        if there is not None and not stat.S_ISREG(there.st_mode):
            return None
        if not os.path.isdir(os.path.dirname(shared)):
            return None
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if "w" not in mode and not os.path.exists(place):
            if there is None and "r" in mode:
                return None
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(shared, place)
        self._writing.add(place)
        return place

    def _claim(self, name: str, *, keeps: bool) -> None:
        """Make a name that of the chief. The version that another task has published is removed, unless the
        chief `keeps` it, to change it."""
        if name in self._known:
            return
        with self._names_of_chief() as file:
            if name not in self._known:
                file.write(os.fsencode(name) + b"\0")
                self._known.add(name)
                if not keeps and self._is_published(name):
                    _remove(self._shared(name))

    def _is_published(self, name: str) -> bool:
        """Return whether another task has published the job's file of that name."""
        shared = self._shared(name)
        there = _stat(shared)
        if there is None or there.st_nlink == 1:
            return False
        places = (os.path.join(self._tasks, task, "files", name) for task in os.listdir(self._tasks))
        return any(_is_same(shared, place) for place in places)

    def end_writing(self, name: str, was_published: bool = False) -> None:
        """Publish a file that was written and is whole, unless the name is the chief's or taken."""
        place, shared = self._private(name), self._shared(name)
        self._writing.discard(place)
        if not os.path.isfile(place) or _is_same(place, shared):
            return
        with self._names_of_chief():
            there = _stat(shared)
            taken = there is not None and there.st_size > 0 and not was_published
            if name in self._known or taken:
                return
            part = f"{place}.part-{os.getpid()}"
            # Links may not be possible; then the file stays with this task.
            with contextlib.suppress(OSError):
                os.link(place, part)
                _replace(part, shared)

    # Names that change, in other tasks than the chief

    def rename(self, do: Callable[..., None], source: Any, target: Any, **folders: Any) -> None:
        """Rename a file as `do`, which is `os.rename` or `os.replace`."""
        old, new = self.name_of(source), self.name_of(target)
        if folders or old is None or self.reading_place(old) is None:
            do(source, target, **folders)
            return
        place, published = self._private(old), self._shared(old)
        is_published = _is_same(place, published)
        if new is None:
            do(place, target)
        else:
            was_published = _is_same(self._private(new), self._shared(new))
            os.makedirs(os.path.dirname(self._private(new)), exist_ok=True)
            do(place, self._private(new))
            self.end_writing(new, was_published)
        if is_published:
            _remove(published)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Remove a file as `os.remove`."""
        name = self.name_of(path) if dir_fd is None else None
        if name is None or self.reading_place(name) is None:
            _remove(path, dir_fd=dir_fd)
            return
        is_published = _is_same(self._private(name), self._shared(name))
        _remove(self._private(name))
        if is_published:
            _remove(self._shared(name))


class _OwnFile(io.FileIO):
    """A file that reports that it is closed."""

    def __init__(self, path: str, mode: str, when_closed: Callable[[], None]) -> None:
        super().__init__(path, mode.replace("b", "").replace("t", ""))
        self._when_closed = when_closed

    def close(self) -> None:
        was_open = not self.closed
        super().close()
        if was_open:
            self._when_closed()


def _wrap(
    raw: _OwnFile, mode: str, buffering: int, encoding: str | None, errors: str | None, newline: str | None
) -> Any:
    """Return what `open` returns for a raw file."""
    if buffering == 0:
        if "b" not in mode:
            raise ValueError("can't have unbuffered text I/O")
        return raw
    size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
    binary = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
    if "b" in mode:
        return binary
    text = io.TextIOWrapper(binary, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def _treat_hdf5(files: WrittenFiles) -> None:
    h5py: Any = sys.modules["h5py"]

    begin, end = h5py.File.__init__, h5py.File.close

    @functools.wraps(begin)
    def __init__(self: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
        found = files.name_of(name)
        if found is not None and mode in ("w", "a", "r+"):
            exists = os.path.exists(name)
            place = files.begin_writing(found, mode if mode != "a" else "r+" if exists else "w")
            name, self._insitu_name = place or name, found if place else None
        elif found is not None and mode == "r":
            name = files.reading_place(found) or name
        begin(self, name, mode, *args, **kwargs)

    @functools.wraps(end)
    def close(self: Any) -> None:
        end(self)
        name, self._insitu_name = getattr(self, "_insitu_name", None), None
        if name is not None:
            files.end_writing(name)

    h5py.File.__init__, h5py.File.close = __init__, close


def _treat_torch(files: WrittenFiles) -> None:
    torch: Any = sys.modules["torch"]

    save = torch.save

    @functools.wraps(save)
    def save_by_open(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if files.name_of(f) is None:
            save(obj, f, *args, **kwargs)
        else:
            # By its name PyTorch would write it without Python's `open`.
            with open(f, "wb") as file:
                save(obj, file, *args, **kwargs)

    torch.save = save_by_open
