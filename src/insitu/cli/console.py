"""Output of the commands. Results go to stdout, notices about the command itself and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TextIO

import typer

from insitu.base.errors import InputError
from insitu.service import format_duration as format_duration
from insitu.service import format_position as format_position
from insitu.service import format_size as format_size
from insitu.service import format_time as format_time

if TYPE_CHECKING:
    from rich.progress import Progress

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, in the form of docs/reference/json.md.")
]

_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)
_RED, _DIM = 31, 2
_IN_NOTICES = "\n\t"
_CELL_WIDTH = 60
"""Characters of a text in a cell."""


def wants_colour(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal and $NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: int, stream: TextIO) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if wants_colour(stream) else text


def escape_controls(text: str, kept: str = "") -> str:
    """Return a text without what a terminal would obey: names and values may come from anybody's file or
    server. `kept` are characters that stay."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def print_error(message: str) -> None:
    """Print an error on stderr, escaped."""
    shown = escape_controls(message, _IN_NOTICES)
    sys.stderr.write(f"{paint('error:', _RED, sys.stderr)} {shown}\n")


def print_notice(message: str) -> None:
    """Print on stderr what concerns the command rather than its result, escaped."""
    sys.stderr.write(f"{escape_controls(message, _IN_NOTICES)}\n")
    sys.stderr.flush()


def print_json(value: Any) -> None:
    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the header and the rows, escaped, with columns as wide as their widest cell."""
    table = [[escape_controls(cell) for cell in row] for row in (header, *rows)]
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


def ask_to_delete(command: str, what: str) -> None:
    """Ask on a terminal whether to delete `what`. Raises InputError if nobody can answer, Abort for no."""
    if not sys.stdin.isatty():
        raise InputError(
            f"`insitu {command}` asks first, and its input isn't a terminal. Received: {what}. Give --yes to "
            f"delete without asking"
        )
    typer.confirm(f"Delete {what}?", abort=True, err=True)


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


@contextlib.contextmanager
def shown_bytes(task: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on stderr if that is a terminal. Yield what receives the bytes done, and those in all. An
    empty `task` has none."""
    if not task or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with open_byte_bar() as bar:
        number = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)
