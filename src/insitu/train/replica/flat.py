"""The layout of a replica's numbers in the buffers that tasks exchange.

Each step exchanges two buffers. `floats` holds what is averaged over shards by rows: gradients, then the
floating state that the forward pass moves (BatchNorm statistics). `record` holds, in float64, what is summed
over shards or taken from one: rows, metric sums, counters and seeds. Both are flat; spans map them to
variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

MAX_BUCKET_ELEMENTS = 1 << 16
"""Elements up to which the backend joins neighbouring tensors before they are copied out. Below it the fixed
cost of one more copy exceeds that of joining."""


@dataclass(frozen=True, slots=True)
class Span:
    """The interval of one tensor in a flat buffer."""

    start: int
    """Index of its first element."""
    stop: int
    """Index behind its last element."""
    shape: tuple[int, ...]
    """The tensor's shape."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring tensors that are copied at once."""

    members: tuple[int, ...]
    """Their indices."""
    start: int
    """Index of the first element in the flat buffer."""
    stop: int
    """Index behind the last element."""


def compute_spans(shapes: Sequence[tuple[int, ...]], start: int = 0) -> tuple[Span, ...]:
    """Return the spans of tensors of `shapes`, one after the other from `start`, without gaps."""
    spans = []
    for shape in shapes:
        stop = start + prod(shape)
        spans.append(Span(start, stop, tuple(shape)))
        start = stop
    return tuple(spans)


def group_into_buckets(spans: Sequence[Span], max_elements: int = MAX_BUCKET_ELEMENTS) -> tuple[Bucket, ...]:
    """Group `spans` into buckets: each run of small neighbours is one, each large tensor another."""
    buckets: list[Bucket] = []
    run: list[int] = []

    def close() -> None:
        if run:
            buckets.append(Bucket(tuple(run), spans[run[0]].start, spans[run[-1]].stop))
            run.clear()

    for index, span in enumerate(spans):
        if span.stop - span.start > max_elements:
            close()
            buckets.append(Bucket((index,), span.start, span.stop))
            continue
        if run and span.stop - spans[run[0]].start > max_elements:
            close()
        run.append(index)
    close()
    return tuple(buckets)
