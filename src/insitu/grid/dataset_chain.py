"""Pure: the settings of a dataset that its calls have made, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.grid.partitions import TEXT
from insitu.grid.selection import Filter, Step, Take
from insitu.grid.structure import Pad
from insitu.spec import CacheSpec

_NAMES = {Filter: "filter", Take: "take"}


@dataclass(frozen=True, slots=True)
class Chain:
    """The settings that shuffle, batch, map and repeat have made."""

    #: None without shuffle.
    seed: int | None = None
    #: Blocks of a window in which rows are mixed; None: the whole shard is.
    window_blocks: int | None = None
    #: Rows of a step over all shards; None without batch.
    batch_size: int | None = None
    #: Functions of a batch, in the order in which they are applied.
    maps: tuple[Callable[..., Any], ...] = ()
    #: What rows of different lengths are filled up with, and to which length; None: there are none.
    pad: Pad | None = None
    #: Passes over the rows in an epoch; None without end.
    passes: int | None = 1


def describe_chain(steps: Sequence[Step], chain: Chain) -> str:
    """Return the calls that have made a dataset, as in `.shuffle(0).batch(64)`."""
    exact = "" if chain.window_blocks is None else f", windows of {chain.window_blocks} blocks"
    text = "".join(f".{_NAMES[type(step)]}(...)" for step in steps)
    text += "" if chain.seed is None else f".shuffle({chain.seed}{exact})"
    text += "" if chain.batch_size is None else f".batch({chain.batch_size})"
    text += "" if chain.passes == 1 else f".repeat({chain.passes or ''})"
    return text + "".join(f".map({getattr(fn, '__name__', fn)})" for fn in chain.maps)


def describe_columns_of(cache: CacheSpec, names: Sequence[str]) -> str:
    """Return names, dtypes and shapes of some columns."""
    return ", ".join(
        f"{c.name}: {'text' if c.dtype == TEXT else c.dtype}{list(c.shape) or ''}"
        for c in cache.columns
        if c.name in names
    )
