"""How far an import is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from insitu.cli.console import format_size, open_byte_bar, print_notice

LINE_SECONDS = 30.0
"""Seconds between two lines."""


class ReadProgress:
    """Keeps how much of the sources this call has read, and passes it on to `show`."""

    def __init__(self, show: Callable[[int, int, int | None], None]) -> None:
        self.rows_read = 0
        self.bytes_read = 0
        self._first: tuple[int, int] | None = None
        self._show = show

    def report(self, rows: int, bytes_done: int, bytes_total: int | None) -> None:
        # The first report gives the start of the call: an earlier one may have been interrupted there.
        self._first = self._first or (rows, bytes_done)
        self.rows_read, self.bytes_read = rows - self._first[0], bytes_done - self._first[1]
        self._show(rows, bytes_done, bytes_total)


@contextlib.contextmanager
def shown_progress(cache: str) -> Iterator[ReadProgress]:
    """Show a progress bar on stderr if that is a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield ReadProgress(ProgressLines(cache, time.monotonic()).show)
        return
    with open_byte_bar("{task.fields[rows]:,} rows") as bar:
        task = bar.add_task(f"import {cache}", rows=0, total=None)

        def show(rows: int, bytes_done: int, bytes_total: int | None) -> None:
            done = bytes_total is not None and bytes_done >= bytes_total
            bar.update(
                task,
                completed=bytes_done,
                total=bytes_total,
                rows=rows,
                description=f"write {cache}" if done else f"import {cache}",
            )

        yield ReadProgress(show)


class ProgressLines:
    """Prints how far an import is, with its rate and the time that is left, once in a while."""

    def __init__(self, cache: str, started: float) -> None:
        """`started` is the time of the monotonic clock."""
        self._cache = cache
        self._started = self._last = started
        self._bytes_before: int | None = None

    def show(self, rows: int, bytes_done: int, bytes_total: int | None, now: float | None = None) -> None:
        """Print a line if the last one was LINE_SECONDS ago. `now` is that time by default."""
        now = time.monotonic() if now is None else now
        if self._bytes_before is None:
            self._bytes_before = bytes_done
        if now - self._last < LINE_SECONDS or bytes_total is None:
            return
        self._last = now
        rate = max(1.0, (bytes_done - self._bytes_before) / (now - self._started))
        print_notice(
            f"import {self._cache}: {rows:,} rows, {format_size(bytes_done)} of {format_size(bytes_total)}, "
            f"{format_size(int(rate))}/s, about {format_seconds((bytes_total - bytes_done) / rate)} left"
        )


def format_seconds(seconds: float) -> str:
    """Return a time in hours, minutes and seconds, such as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
