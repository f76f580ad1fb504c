"""Exchanges structures, rows and state between tasks, over the group of `insitu.exchange`.

Begin reading with `transfer.py`.
"""

from insitu.train.collectives.gather import (
    by_shard,
    gather_bytes,
    gather_counts,
    gather_rows,
    gather_sizes,
    nothing,
)
from insitu.train.collectives.serialization import (
    NotPlain,
    Parcel,
    copied,
    dtype_of,
    pack,
    plain_part,
    unpack,
)
from insitu.train.collectives.transfer import exchange_notes, share

__all__ = [
    "NotPlain",
    "Parcel",
    "by_shard",
    "copied",
    "dtype_of",
    "exchange_notes",
    "gather_bytes",
    "gather_counts",
    "gather_rows",
    "gather_sizes",
    "nothing",
    "pack",
    "plain_part",
    "share",
    "unpack",
]
