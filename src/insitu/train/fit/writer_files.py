"""Keeps files that callbacks append to free of what is written twice: by a chief that is lost, and again."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras

_EVENTS = "events.out.tfevents."

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


def rewind_files(callback: Any, marks: Marks) -> None:
    """Cut the files of a callback to where they were marked, and take those away that were begun later."""
    if not marks:
        return
    sizes: dict[str, int] = marks["sizes"]
    for name, size in sizes.items():
        _cut(Path(name), size)
    if isinstance(callback, keras.callbacks.TensorBoard):
        # The graph that this process has written is there already.
        for writer in callback._writers.values():
            writer.close()
        callback._writers = {}
        for path in _summaries(callback):
            if str(path) not in sizes and _writer_of(path) in (marks["writer"], _writer()):
                path.unlink(missing_ok=True)


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
    """Return the event files in the folders of Keras' TensorBoard."""
    if "://" in callback.log_dir:
        return []
    folders = (Path(callback.log_dir, part) for part in ("train", "validation"))
    return [path for folder in folders for path in sorted(folder.glob(f"{_EVENTS}*"))]


def _writer() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


def _writer_of(path: Path) -> str:
    """Return the host and the process in the name of an event file."""
    # events.out.tfevents.SECONDS.HOST.PID.NUMBER.v2
    return ".".join(path.name.removeprefix(_EVENTS).split(".")[1:-2])
