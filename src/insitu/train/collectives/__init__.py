"""Exchange structures, rows and state between tasks, over the group of `insitu.exchange`.

Begin reading with `transfer.py`.
"""

from insitu.train.collectives.gather import (
    barrier_token,
    gather_bytes,
    gather_counts,
    gather_rows,
    gather_sizes,
    pack_leaves,
    squeeze_shards,
)
from insitu.train.collectives.transfer import all_gather_json, broadcast_value
