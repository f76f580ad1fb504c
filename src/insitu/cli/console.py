"""Output of the commands. Results go to stdout, notices about the command itself and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)
_RED, _DIM = 31, 2
_CELL_WIDTH = 60
"""Characters of a text in a cell."""


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal and $NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: int, stream: TextIO) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if wants_colour(stream) else text


def print_error(message: str) -> None:
    """Print an error on stderr. What a terminal would obey, such as bytes of a file, is escaped."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in message)
    sys.stderr.write(f"{paint('error:', _RED, sys.stderr)} {shown}\n")


def print_notice(message: str) -> None:
    """Print on stderr what concerns the command rather than its result."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the header and the rows, with columns as wide as their widest cell."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the header is dimmed on a terminal."""
    first, *lines = table_lines(header, rows)
    sys.stdout.write(f"{paint(first, _DIM, sys.stdout)}\n")
    sys.stdout.writelines(f"{line}\n" for line in lines)


def format_cell(text: str) -> str:
    """Return `text` as one line, short enough for a cell of a table."""
    line = " ".join(text.split())
    return line if len(line) <= _CELL_WIDTH else f"{line[: _CELL_WIDTH - 3]}..."


def format_duration(seconds: float) -> str:
    """Return such as `42s`, `3m10s`, `2h05m`, `4d3h`."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def format_position(progress: Mapping[str, int] | None) -> str:
    """Return such as `epoch 2 step 17`, counted from 1 as Keras prints them; `-` before training."""
    if not progress or progress["epoch"] < 0:
        return "-"
    return f"epoch {progress['epoch'] + 1} step {progress['step'] + 1}"


def format_time(at: float) -> str:
    """Return the local date and time of `at`, in seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


class OutputPrinter:
    """Prints lines of a job's merged output, each with its task: in a colour of its own on a terminal.

    insitu's own lines go to stderr, so that stdout holds what the training printed and nothing else.
    """

    def __init__(self, *, prefix: bool, all_to_stdout: bool = False) -> None:
        self._prefix = prefix
        self._all_to_stdout = all_to_stdout
        self._colours: dict[str, int] = {}

    def print(self, lines: Iterable[bytes]) -> None:
        from insitu.cluster import split_prefix

        for line in lines:
            source, text = split_prefix(line)
            own = source == "insitu"
            stream = sys.stderr if own and not self._all_to_stdout else sys.stdout
            head = ""
            if self._prefix or own:
                colour = self._colours.setdefault(source, _COLOURS[len(self._colours) % len(_COLOURS)])
                head = paint(f"[{source}]", colour, stream) + " "
            out: BinaryIO = stream.buffer
            out.write(head.encode() + text + b"\n")
        sys.stdout.buffer.flush()
        sys.stderr.buffer.flush()

    def print_raw(self, lines: Iterable[bytes]) -> None:
        """Print lines of one task's own log as they are."""
        for line in lines:
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def format_size(size: int) -> str:
    """Return a number of bytes in the largest fitting unit, such as 24.9 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


@contextlib.contextmanager
def open_byte_bar(*further: str) -> Iterator[Progress]:
    """Open a bar on stderr for bytes, with their rate and the time that is left. `further` are formats of
    columns, as of `rich.progress.TextColumn`. It goes when it is closed."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        *map(TextColumn, further),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar
