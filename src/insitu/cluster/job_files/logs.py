"""Writes a job's logs: each task's raw output, and the merged output of all.

A log that has become `MAX_LOG_BYTES` long is put aside, in the place of the part before it, and a new one is
begun: so much at least is kept of each, and twice that at most.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import read_file_size_limit
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId

MAX_LOG_BYTES = 128 << 20
MAX_CONTROLLER_LOG_BYTES = 8 << 20
RESERVED_BYTES = 1 << 20
"""Bytes of a disk that output of tasks leaves free, for the journal and insitu's own lines, the last of which
say how the job ended."""
_CUT_OFF = b" [cut off: no room was left]\n"
"""Ends a line of which there was room for a part only."""
_RESERVED_SHARE = 16
"""For a small disk, one part in so many."""
INSITU_SOURCE = "insitu"
"""Stands in the place of a task before insitu's own lines."""


class WritableLog(Protocol):
    """A log to which bytes are appended."""

    def write(self, data: memoryview, /) -> int:
        """Return how many bytes were written. Raises OSError."""

    def close(self) -> None: ...


class MergedLog:
    """Writes insitu's own lines into the merged output, to which `JobLogs` writes those of the tasks."""

    def __init__(self, job: JobPaths) -> None:
        self._path = job.output

    def log(self, text: str) -> None:
        """Write a line of insitu's own, for each line of `text`. A full disk costs the line."""
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(format_merged(INSITU_SOURCE, text.encode(errors="backslashreplace").splitlines()))

    def size(self) -> int:
        """Return the bytes of the merged output so far; 0 if it can't be read."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


class RotatedLog:
    """One log. Others may append to it by its path."""

    def __init__(self, path: Path) -> None:
        """Open the log, or make it. Raises OSError."""
        self._path = path
        self._file = path.open("ab", buffering=0)
        limit = read_file_size_limit()
        #: Bytes after which it is put aside. One that may not grow further has room for insitu's own lines.
        self._most = MAX_LOG_BYTES if limit is None else min(MAX_LOG_BYTES, limit // 2)

    def write(self, data: bytes | memoryview) -> int:
        """Append as much of `data` as goes. Returns how much that is. Raises OSError."""
        if os.fstat(self._file.fileno()).st_size >= self._most:
            self._rotate()
        return self._file.write(data)

    def _rotate(self) -> None:
        older = rotated_path(self._path)
        drops = older.exists()
        self._path.replace(older)
        try:
            fresh = self._path.open("ab", buffering=0)
        except OSError:
            older.replace(self._path)  # what is open is written on
            raise
        self.close()
        self._file = fresh
        if drops:
            kept = f"the log before this is in {older.name}; what came before that was dropped"
            self._file.write(f"[{INSITU_SOURCE}] {kept}\n".encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # some disks say only now that they have failed
            self._file.close()


def bound_controller_log(job: JobPaths) -> None:
    """Put aside what the controllers' log has, in the place of what was put aside before, once it is long.

    The supervisor and its controllers append to one open file, so it is copied and emptied, not renamed. Work
    that can't be done now, as on a full disk, is done later.
    """
    path = job.controller_log
    with contextlib.suppress(OSError):
        if path.stat().st_size < MAX_CONTROLLER_LOG_BYTES:
            return
        older = rotated_path(path)
        staged = older.with_name(f".{older.name}")
        with path.open("r+b") as log:
            with staged.open("wb") as copy:
                os.fchmod(copy.fileno(), PRIVATE_FILE)
                log.seek(-MAX_CONTROLLER_LOG_BYTES, os.SEEK_END)
                shutil.copyfileobj(log, copy)
            staged.replace(older)
            log.truncate(0)


class _OutputLog:
    """A log of output, with notes of what is missing in it."""

    def __init__(self, path: Path) -> None:
        """Open the log, or make it. Raises OSError."""
        self._folder = path.parent
        self._log: WritableLog = RotatedLog(path)
        #: Bytes that are missing since the last note.
        self._lost = 0
        #: Whether the log ends within a line that was cut off.
        self._torn = False

    def write(self, data: bytes) -> None:
        """Append `data`. Data for which there is no room is missing."""
        taken = self._append(data) if self._has_room() and self._record_loss() else 0
        self._lost += len(data) - taken

    def _record_loss(self) -> bool:
        """Write how many bytes are missing, if some are. Returns False if there is no room for it."""
        if not self._lost:
            return True
        note = f"{self._lost} bytes of output could not be written: no room was left"
        line = _CUT_OFF * self._torn + format_merged(INSITU_SOURCE, [note.encode()])
        if self._append(line) < len(line):
            return False
        self._lost, self._torn = 0, False
        return True

    def _append(self, data: bytes) -> int:
        """Append as much as goes. Returns how much that is."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._log.write(view) :]
        except OSError:
            self._torn = self._torn or len(view) < len(data)
        return len(data) - len(view)

    def _has_room(self) -> bool:
        """Return whether the disk has more room than what is reserved, as far as the system says it."""
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            return True
        reserved = min(RESERVED_BYTES, disk.f_blocks * disk.f_frsize // _RESERVED_SHARE)
        return disk.f_bavail * disk.f_frsize > reserved

    def close(self) -> None:
        self._record_loss()  # for which room is reserved
        self._log.close()


class JobLogs:
    """Writes a job's logs, in its supervisor.

    A full disk costs lines, never the job; what is missing in a log is noted there.
    """

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._merged = _OutputLog(job.output)
        self._tasks: dict[TaskId, tuple[_OutputLog, LineAssembler]] = {}
        self._merger = LineMerger()

    def open(self, task: TaskId, incarnation: int) -> None:
        """Open the log of a new incarnation of `task`."""
        path = self._job.task_log(task, incarnation)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tasks[task] = (_OutputLog(path), LineAssembler())

    def write(self, task: TaskId, data: bytes, now: float) -> None:
        raw, assembler = self._tasks[task]
        raw.write(data)
        if lines := assembler.feed(data, now):
            self._put_merged(self._merger.add(str(task), lines, now))

    def release(self, now: float) -> None:
        """Write lines of tasks that were held back for long."""
        self._put_merged(self._merger.release(now))

    def close(self, task: TaskId) -> None:
        """Close the log of a task that has ended: what it left unfinished becomes a line."""
        opened = self._tasks.pop(task, None)
        if opened is not None:
            raw, assembler = opened
            raw.close()
            lines = self._merger.add(str(task), assembler.flush(), 0.0)
            self._put_merged(lines + self._merger.end(str(task)))

    def _put_merged(self, data: bytes) -> None:
        if data:
            self._merged.write(data)

    def finish(self) -> None:
        for task in list(self._tasks):
            self.close(task)
        self._put_merged(self._merger.finish())
        self._merged.close()


# Chooses which lines of tasks come into a job's merged output. Each task's own log has all of them. Pure.
#
# - Lines that TensorFlow prints in each process before anything of the user's don't.
# - A traceback that tasks write alike comes once. A script's mistake ends all tasks in the same way


LONGEST_HOLD = 5.0
"""Seconds for which lines of a task are held back that may be those of another task once more."""
MAX_TRACEBACK_LINES = 500
_HEADER = b"Traceback (most recent call last):"
_FRAME = b'  File "'
"""Begins what Python prints of a SyntaxError."""
_LINKS = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_NEWS = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|To enable the following instructions: .*rebuild TensorFlow with the appropriate compiler flags"
    rb"|(?:[IWE]\d{4} \S+ +\d+ |\d{4}-\d\d-\d\d \S+ [IWE] )(?:\S*/)?(?:"
    rb"port\.cc:\d+\] oneDNN custom operations are on"
    rb"|cpu_feature_guard\.cc:\d+\] "
    rb"|cudart_stub\.cc:\d+\] Could not find cuda drivers"
    rb"|cuda_\w+\.cc:\d+\] (?:failed call to cuInit: .*(?:NO_DEVICE|\(303\)|no CUDA-capable device)"
    rb"|Unable to register cu\w+ factory)"
    rb"|cuda_diagnostics\.cc:\d+\] "
    rb"|computation_placer\.cc:\d+\] computation placer already registered)"
)


def is_news(line: bytes) -> bool:
    """Return whether TensorFlow prints `line` in each process that loads it, also if all is well."""
    return line[:1] in b"WTIE0123456789" and _NEWS.match(line) is not None


class LineMerger:
    """Formats the lines of tasks as they come.

    The first task that begins a traceback is shown at once. Others that begin one are held back as long as
    they write the same lines.
    """

    def __init__(self) -> None:
        self._shown_of = ""
        """The task whose traceback is shown; empty before the first one."""
        self._shown: list[bytes] = []
        """Lines of that task since its traceback began."""
        self._grows = False
        """Whether that task may still write more of it."""
        self._held: dict[str, list[bytes]] = {}
        """Lines of other tasks that were equal so far, or come before those they are compared with."""
        self._held_since: dict[str, float] = {}

    def add(self, source: str, lines: Sequence[bytes], now: float) -> bytes:
        """Return what the merged output gets for `lines` of a task."""
        return b"".join(self._add_line(source, line, now) for line in lines if not is_news(line))

    def end(self, source: str) -> bytes:
        """Return what the merged output gets as `source` has written its last line."""
        if source == self._shown_of:
            self._grows = False
            return b"".join(self._flush(task) for task in list(self._held) if self._is_decided(task))
        return self._flush(source) if self._is_decided(source) else b""

    def release(self, now: float) -> bytes:
        """Return the lines that were held back for long, if they aren't those of another task once more."""
        due = [task for task, since in self._held_since.items() if not 0 <= now - since < LONGEST_HOLD]
        return b"".join(map(self._flush, due))

    def finish(self) -> bytes:
        """Return the lines that are still held back."""
        return b"".join(map(self._flush, list(self._held)))

    def _add_line(self, source: str, line: bytes, now: float) -> bytes:
        record = self._held.get(source) or (self._shown if source == self._shown_of else [])
        if _begins_traceback(line, record):
            return self._begin(source, line, now)
        if source in self._held:
            self._held[source].append(line)
            return self._flush(source) if not self._may_be_same(source) else b""
        out = format_merged(source, [line])
        if source != self._shown_of or len(self._shown) >= MAX_TRACEBACK_LINES:
            return out
        self._shown.append(line)
        return out + b"".join(self._flush(task) for task in list(self._held) if not self._may_be_same(task))

    def _begin(self, source: str, line: bytes, now: float) -> bytes:
        out = self._flush(source)
        if self._shown_of not in ("", source):
            self._held[source], self._held_since[source] = [line], now
            return out + (b"" if self._may_be_same(source) else self._flush(source))
        out += self.finish()
        self._shown_of, self._shown, self._grows = source, [line], True
        return out + format_merged(source, [line])

    def _may_be_same(self, source: str) -> bool:
        held, shown = self._held[source], self._shown
        if held[: len(shown)] != shown[: len(held)]:
            return False
        return len(held) <= len(shown) or (self._grows and len(held) < MAX_TRACEBACK_LINES)

    def _is_decided(self, source: str) -> bool:
        return source in self._held and (not self._grows or len(self._held[source]) <= len(self._shown))

    def _flush(self, source: str) -> bytes:
        """Forget what is held of `source`. Return it, unless it was shown already."""
        held = self._held.pop(source, [])
        self._held_since.pop(source, None)
        is_shown = held == self._shown[: len(held)]
        return b"" if is_shown else format_merged(source, held)


def _begins_traceback(line: bytes, record: Sequence[bytes]) -> bool:
    """Return whether `line` begins another traceback than that of `record`, the lines before."""
    if line != _HEADER:
        return not record and line.startswith(_FRAME)
    return not (len(record) > 1 and record[-1] == b"" and record[-2] in _LINKS)


# Reads a growing log from its start until its writer is done, also across rotations (see `logs.py`)


POLL_INTERVAL = 0.05
"""Seconds between two reads of a log that hasn't grown."""
_CHUNK = 1 << 20


def rotated_path(path: Path) -> Path:
    """Return the path of the older part of a log once it has been rotated."""
    return path.with_name(f"{path.name}.1")


def follow(
    path: Path, is_over: Callable[[], bool], poll_interval: float = POLL_INTERVAL, start: int = 0
) -> Iterator[list[bytes]]:
    """Yield the whole lines of `path` from byte `start` on, without their ends, in batches as they come.

    The older part comes first from byte 0 on, if there is one. Ends once `is_over` and everything is read. A
    last line that lacks its end is yielded at the end.
    """
    rest = b""
    file = _open_first(path, start)
    try:
        while True:
            # Asked before reading: what is written until the answer is "over" will then be read.
            over, is_newest = is_over(), _is_same(file, path)
            while data := file.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    yield lines
            if not is_newest:
                following = _open_next(path, file)
                if following is not None:
                    file.close()
                    file = following
                    continue
            elif over:
                break
            time.sleep(poll_interval)
    finally:
        file.close()
    if rest:
        yield [rest]


def _open_first(path: Path, start: int) -> BinaryIO:
    older = rotated_path(path)
    if start == 0 and older.exists():
        return older.open("rb", buffering=0)
    file = path.open("rb", buffering=0)
    file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
    return file


def _open_next(path: Path, file: BinaryIO) -> BinaryIO | None:
    """Return the part of the log that follows `file`, which isn't the newest; None while it isn't there."""
    older = rotated_path(path)
    try:
        missed = older.exists() and not _is_same(file, older)
        return (older if missed else path).open("rb", buffering=0)
    except FileNotFoundError:
        return None


def _is_same(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        # Rotated just now: the next part isn't there yet.
        return False


# Turns the bytes that tasks print into whole lines, and lines into the job's merged output.
#
# A line of `output.log` is `[worker:0] text`. Text is kept as bytes: it is neither decoded nor reordered


MAX_LINE_BYTES = 16 * 1024
"""Bytes of one line; a longer one is cut into several."""
REDRAW_INTERVAL = 1.0
"""Seconds between two states of a progress bar (text that ends in a carriage return) in the merged output."""


class LineAssembler:
    """Cuts one task's stream into lines. Pure: the time is passed in.

    A bare carriage return means that the text before it is about to be drawn over. One such state a second at
    most becomes a line; the last one before the newline always does.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn = b""
        self._drawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that `data` completes, without their ends."""
        lines: list[bytes] = []
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            lines += self._take_last_state(line.removesuffix(b"\r"), now, complete=True)
        if b"\r" in self._rest[:-1]:
            *states, self._rest = self._split_keeping_last_return(self._rest)
            lines += self._take_last_state(b"\r".join(states), now, complete=False)
        while len(self._rest) > MAX_LINE_BYTES:
            head, self._rest = _cut(self._rest)
            lines.append(head)
        return lines

    def flush(self) -> list[bytes]:
        """Return what is left when the stream has ended."""
        rest, self._rest = self._rest, b""
        return self._take_last_state(rest.rstrip(b"\r"), 0.0, complete=True) if rest or self._drawn else []

    @staticmethod
    def _split_keeping_last_return(text: bytes) -> list[bytes]:
        """Return the states that were drawn over; last, what may still grow (a return at its end stays)."""
        head, _, tail = text[:-1].rpartition(b"\r")
        return [*head.split(b"\r"), tail + text[-1:]]

    def _take_last_state(self, text: bytes, now: float, *, complete: bool) -> list[bytes]:
        """Return the lines to print for `text`, whose carriage returns part it into states of one line."""
        last = next((state for state in reversed(text.split(b"\r")) if state), b"")
        if not complete:
            if not last or now - self._drawn_at < REDRAW_INTERVAL:
                self._drawn = last or self._drawn
                return []
            self._drawn, self._drawn_at = b"", now
            return _cut_into_pieces(last)
        last = last or self._drawn
        self._drawn = b""
        return _cut_into_pieces(last)


def _cut_into_pieces(line: bytes) -> list[bytes]:
    pieces = []
    while len(line) > MAX_LINE_BYTES:
        head, line = _cut(line)
        pieces.append(head)
    return [*pieces, line]


def _cut(line: bytes) -> tuple[bytes, bytes]:
    """Cut `line` in two, the first of at most MAX_LINE_BYTES bytes and no UTF-8 character cut."""
    end = MAX_LINE_BYTES
    while end > MAX_LINE_BYTES - 4 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end], line[end:]


def format_merged(source: str, lines: list[bytes]) -> bytes:
    """Return `lines` of `source` as they stand in the merged output."""
    prefix = f"[{source}] ".encode()
    return b"".join(prefix + line + b"\n" for line in lines)


def split_prefix(line: bytes) -> tuple[str, bytes]:
    """Return (source, text) of one line of the merged output."""
    source, found, text = line.partition(b"] ")
    if not found or not source.startswith(b"["):
        return "", line
    return source[1:].decode(errors="replace"), text
