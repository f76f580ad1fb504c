"""Turns the bytes that tasks print into whole lines, and lines into the job's merged output.

A line of `output.log` is `[worker:0] text`. Text is kept as bytes: it is neither decoded nor reordered.
"""

from __future__ import annotations

MAX_LINE_BYTES = 16 * 1024
"""Bytes of one line; a longer one is cut into several."""
REDRAW_INTERVAL = 1.0
"""Seconds between two states of a progress bar (text that ends in a carriage return) in the merged output."""


class LineAssembler:
    """Cuts one task's stream into lines. Pure: the time is passed in.

    A bare carriage return means that the text before it is about to be drawn over. Of such states one a
    second at most becomes a line; the last one before the newline always does.
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
