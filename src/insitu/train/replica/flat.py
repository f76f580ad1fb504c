"""How a replica's numbers are laid out in the buffers that tasks exchange.

Two buffers travel in each step. `floats` holds what is averaged over shards by rows: gradients, then the
floating state that the forward pass moves (BatchNorm statistics). `record` holds, in float64, what is added
up or taken as it is: rows, metric sums, counters and seeds. Both are flat; a layout says which span belongs
to which variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

SMALL_PIECE = 1 << 16
"""Elements up to which neighbouring tensors are joined by the backend before they are copied out: below it
the fixed cost of one more copy is larger than that of joining."""


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one tensor: half-open interval [start, stop) of a flat buffer, and its shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tensors that are copied at once: `members` by index, [start, stop) their place."""

    members: tuple[int, ...]
    start: int
    stop: int


def lay_out(shapes: Sequence[tuple[int, ...]], start: int = 0) -> tuple[Span, ...]:
    """Spans for tensors of `shapes`, one after the other from `start`, without gaps."""
    spans = []
    for shape in shapes:
        stop = start + prod(shape)
        spans.append(Span(start, stop, tuple(shape)))
        start = stop
    return tuple(spans)


def into_pieces(spans: Sequence[Span], small: int = SMALL_PIECE) -> tuple[Piece, ...]:
    """`spans` grouped into pieces: runs of small neighbours together, each large tensor alone."""
    pieces: list[Piece] = []
    run: list[int] = []

    def close() -> None:
        if run:
            pieces.append(Piece(tuple(run), spans[run[0]].start, spans[run[-1]].stop))
            run.clear()

    for index, span in enumerate(spans):
        if span.stop - span.start > small:
            close()
            pieces.append(Piece((index,), span.start, span.stop))
            continue
        if run and span.stop - spans[run[0]].start > small:
            close()
        run.append(index)
    close()
    return tuple(pieces)
