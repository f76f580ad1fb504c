"""Reads pages of a job's logs, as text without control sequences for terminals or browsers."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.base.errors import InputError

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths
    from insitu.base.spec import TaskId

MAX_LINES = 2000
"""Lines of one page."""
MAX_LINE = 16 * 1024
"""Bytes that are shown of one line."""
_BYTES_PER_PAGE = 4 << 20
"""Bytes of a log that a page without a search looks at."""
_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, movements of the cursor
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS, SOS, PM, APC: titles, links, clipboard
    r"|[ -/]*[0-~])?"
)


def clean_line(line: bytes) -> str:
    """Return a line of a log as text: sequences for terminals left out, control characters escaped.

    If a line was drawn over by carriage returns, its last state is left.
    """
    text = _SEQUENCES.sub("", line[:MAX_LINE].decode("utf-8", errors="replace"))
    states = [state for state in text.split("\r") if state]
    text = states[-1] if states else ""
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def find_incarnation(job: JobPaths, text: str) -> tuple[TaskId, int]:
    """Return the task that `text` names, and the number of its latest incarnation that has a log, or 0.

    Raises InputError for a task that the job doesn't have.
    """
    from insitu.base.spec import TaskId
    from insitu.cluster import read_status

    task = TaskId.parse(text)
    states = {t.task: t for t in read_status(job).state.tasks}
    if task not in states:
        raise InputError(
            f"{job.root.name} has no task {task}. Give one of {', '.join(map(str, states))}. Received: {text}"
        )
    # The state knows of an incarnation a moment before its log is there.
    numbers = range(states[task].incarnation, 0, -1)
    return task, next((n for n in numbers if job.task_log(task, n).exists()), 0)


def read_log(
    job: JobPaths,
    task: str | None = None,
    *,
    attempt: int | None = None,
    lines: int = 200,
    before: int | None = None,
    after: int | None = None,
    search: str = "",
) -> dict[str, Any]:
    """Return the last `lines` lines of a log in the form of docs/reference/json.md: of all tasks merged, or
    of one.

    `before` is a position in the log that they end at. `after` is one that they begin at: then they are the
    first whole lines from there. `search` is a text that each of them holds. Raises InputError for a task or
    an attempt that there isn't.
    """
    if after is not None and (before is not None or search):
        raise InputError(
            "Lines are asked for by one of after, before and search. Received: after with another"
        )
    if task is None and attempt is not None:
        raise InputError(f"An attempt goes with a task. Received: attempt {attempt} without one")
    path, number = job.output, None
    if task is not None:
        identity, latest = find_incarnation(job, task)
        number = attempt or latest
        if attempt is not None and not 1 <= attempt <= latest:
            raise InputError(f"{task} has attempts 1 to {latest}. Received: {attempt}")
        path = job.task_log(identity, number)
    most = min(lines, MAX_LINES)
    if after is not None:
        found, start, end = read_on(path, most, after)
    else:
        found, start, end = read_page(path, most, before, search.encode())
    return {
        "task": task,
        "attempt": number,
        "lines": [_describe(at, line, merged=task is None) for at, line in found],
        "start": start,
        "end": end,
    }


def _describe(at: int, line: bytes, *, merged: bool) -> dict[str, Any]:
    from insitu.cluster import split_prefix

    source, text = split_prefix(line) if merged else ("", line)
    return {"at": at, "source": clean_line(source.encode()), "text": clean_line(text)}


def read_page(
    path: Path, count: int, before: int | None, search: bytes
) -> tuple[list[tuple[int, bytes]], int, int]:
    """Return (lines with their positions, start, end): whole lines of the file that end at `before` or
    earlier, `count` at most. Bytes [start, end) were looked at; 0 for the start means that no line is
    before these."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return [], 0, 0
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                end = len(data) if before is None else max(0, min(before, len(data)))
                found, start = (_find if search else _take_last)(data, end, count, search)
    except FileNotFoundError:
        return [], 0, 0
    return found, start, end


def read_on(path: Path, count: int, after: int) -> tuple[list[tuple[int, bytes]], int, int]:
    """Return (lines with their positions, start, end): `count` whole lines at most, from position `after` on.

    They are in bytes [start, end)."""
    found: list[tuple[int, bytes]] = []
    at = after
    try:
        with path.open("rb") as file:
            file.seek(after)
            while len(found) < count and at - after < _BYTES_PER_PAGE:
                line = file.readline(_BYTES_PER_PAGE)
                if not line.endswith(b"\n") and len(line) < _BYTES_PER_PAGE:
                    break  # its end is yet to be written
                found.append((at, line[:MAX_LINE].rstrip(b"\n")))
                at += len(line)
    except FileNotFoundError:
        return [], after, after
    return found, after, at


def _take_last(data: mmap.mmap, end: int, count: int, search: bytes) -> tuple[list[tuple[int, bytes]], int]:
    found: list[tuple[int, bytes]] = []
    at = end
    while at > 0 and len(found) < count and end - at < _BYTES_PER_PAGE:
        start = data.rfind(b"\n", 0, at - 1) + 1
        found.append((start, data[start : min(at, start + MAX_LINE)].rstrip(b"\n")))
        at = start
    return found[::-1], at


def _find(data: mmap.mmap, end: int, count: int, search: bytes) -> tuple[list[tuple[int, bytes]], int]:
    found: list[tuple[int, bytes]] = []
    at = end
    while len(found) < count and (hit := data.rfind(search, 0, at)) >= 0:
        start = data.rfind(b"\n", 0, hit) + 1
        stop = data.find(b"\n", hit, end)
        found.append((start, data[start : min(end if stop < 0 else stop, start + MAX_LINE)]))
        at = start
        if at == 0:
            break
    return found[::-1], at if len(found) == count else 0
