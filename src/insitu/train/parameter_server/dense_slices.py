"""Match a replica's floats to those without rows of tables, the dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from insitu.train.replica import Span, holds_table_rows


def match_dense_slices(spans: Sequence[tuple[Any, Span]]) -> list[tuple[slice, slice]]:
    """Return (slice of all floats, slice of the dense floats) for each run of neighbouring dense variables.

    `spans` are those of `Replica.float_spans`.
    """
    found: list[tuple[slice, slice]] = []
    dense_stop = 0
    for variable, span in spans:
        if holds_table_rows(variable):
            continue
        whole = slice(span.start, span.stop)
        dense = slice(dense_stop, dense_stop + span.stop - span.start)
        if found and found[-1][0].stop == whole.start:
            found[-1] = slice(found[-1][0].start, whole.stop), slice(found[-1][1].start, dense.stop)
        else:
            found.append((whole, dense))
        dense_stop = dense.stop
    return found
