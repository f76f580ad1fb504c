"""Keeps files that callbacks append to free of what is written twice: by a chief that is lost, and again."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from insitu.base.paths import EVENT_FILE
from insitu.grid import publish_file

Marks = dict[str, Any]
"""`sizes`: the bytes of each file, by its path; `writer`: the host and the process that has written them."""


def mark_files(callback: Any) -> Marks:
    """Return how far the files are written that a callback appends to. All that it has written is in them
    then. Empty for callbacks that append to none, or haven't begun to."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        return _mark([callback.filename]) if callback.csv_file else {}
    if isinstance(callback, keras.callbacks.TensorBoard):
        for writer in callback._writers.values():
            writer.flush()
        mine = _writer()
        return _mark(path for path in _summaries(callback) if _writer_of(path) == mine)
    files = getattr(callback, "appended_files", None)
    return _mark(files) if files else {}


def rewind_files(callback: Any, marks: Marks, writers: Sequence[str] = ()) -> None:
    """Cut the files of a callback to where they were marked, and remove those that were begun later: by
    the process that marked them, or by those of `writers` behind it, who had its place after it."""
    if not marks:
        return
    sizes: dict[str, int] = marks["sizes"]
    for name, size in sizes.items():
        _cut(Path(name), size)
    later = _find_behind(marks["writer"], writers)
    if isinstance(callback, keras.callbacks.TensorBoard):
        # Its mark has all files of the process that marked them.
        later.append(marks["writer"])
    for path in _summaries(callback):
        if str(path) not in sizes and _writer_of(path) in later:
            path.unlink(missing_ok=True)


def begins_files(callback: Any) -> bool:
    """Return whether a callback begins files by itself that are named by their process."""
    return bool(_folders(callback))


def _find_behind(writer: str, writers: Sequence[str]) -> list[str]:
    if writer not in writers:
        return []
    last = len(writers) - 1 - list(reversed(writers)).index(writer)
    return list(writers[last + 1 :])


@contextlib.contextmanager
def appending(callbacks: Iterable[Any]) -> Iterator[list[Any]]:
    """While open, let those callbacks that open a file of their own append to it, whose file is a part of
    what they write. Yield them."""
    found = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger) and not c.append]
    for callback in found:
        callback.append = True
    try:
        yield found
    finally:
        for callback in found:
            callback.append = False


def begin_files(callbacks: Sequence[Any], record: Path) -> None:
    """Take what earlier processes of this task have written of a fit, which begins again from its beginning,
    out of the files of callbacks. `record` keeps what was there when it began for the first time, and who has
    written since. Event files of others stay as they are: another job may write to the same folder."""
    loggers = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger) and c.append]
    appended = {str(logger.filename) for logger in loggers}
    folders = sorted({str(folder) for callback in callbacks for folder in _folders(callback)})
    events = [path for folder in folders for path in _event_files(Path(folder))]
    known = _read(record)
    if known is None:
        known = {"sizes": _mark([*appended, *events])["sizes"], "writers": []}
    elif known["sizes"] is not None:
        ours = [path for path in events if _writer_of(path) in known["writers"]]
        for path in (*map(Path, sorted(appended)), *ours):
            _cut(path, known["sizes"].get(str(path), 0))
        for path in ours:
            if str(path) not in known["sizes"]:
                path.unlink(missing_ok=True)
    _add_writer(record, known)


def take_over_files(record: Path) -> list[str]:
    """Note in `record` that this process writes from now on. Return who has written of the fit before, in
    their order. Others know nothing of those that were lost before they had done a unit."""
    # Without a record the fit began on another host; nobody here knows what was there then.
    known = _read(record) or {"sizes": None, "writers": []}
    _add_writer(record, known)
    return list(known["writers"])


def _read(record: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(record.read_text()))
    except FileNotFoundError:
        return None


def _add_writer(record: Path, known: dict[str, Any]) -> None:
    publish_file(record, json.dumps({**known, "writers": [*known["writers"], _writer()]}).encode())


def _mark(paths: Iterable[Any]) -> Marks:
    sizes = {str(path): path.stat().st_size for path in map(Path, paths) if path.is_file()}
    return {"sizes": sizes, "writer": _writer()}


def _cut(path: Path, size: int) -> None:
    try:
        if path.stat().st_size > size:
            os.truncate(path, size)
    except FileNotFoundError:
        return


def _summaries(callback: Any) -> list[Path]:
    """Return the event files in the folders of a callback."""
    return [path for folder in _folders(callback) for path in _event_files(folder)]


def _folders(callback: Any) -> list[Path]:
    """Return the folders on this machine in which a callback begins event files."""
    if isinstance(callback, keras.callbacks.TensorBoard):
        names = [f"{callback.log_dir}/{part}" for part in ("train", "validation")]
    else:
        names = [str(name) for name in getattr(callback, "event_folders", ())]
    return [Path(name) for name in names if "://" not in name]


def _event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{EVENT_FILE}*"))


def _writer() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


def _writer_of(path: Path) -> str:
    """Return the host and the process in the name of an event file."""
    # events.out.tfevents.SECONDS.HOST.PID.NUMBER.v2; insitu's own have no number.
    parts = path.name.removeprefix(EVENT_FILE).split(".")[1:-1]
    has_number = all(part.isdecimal() for part in parts[-2:])
    return ".".join(parts[:-1] if has_number else parts)
