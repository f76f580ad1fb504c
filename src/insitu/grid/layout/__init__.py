"""Compute the partition of a row, its owner, how copies move, and the order of rows. Pure.

Imports nothing else of `grid`. Begin reading with `order.py`.
"""

from insitu.grid.layout.affinity import (
    check_split,
    hash_integers,
    hash_rows,
    hash_texts,
    owners_of_partition,
    partition_of_rows,
    shard_partitions,
    split_of_rows,
    splitmix64,
)
from insitu.grid.layout.copies import flip_copies, reconcile_copies
from insitu.grid.layout.move_states import (
    Action,
    Failed,
    MoveStep,
    RebalanceState,
    Started,
    Succeeded,
    advance,
    begin_rebalancing,
)
from insitu.grid.layout.order import (
    MOST_SORTED,
    BatchPlan,
    ChosenOrder,
    Order,
    Rows,
    ShuffledPlan,
    batch_sizes,
    order_rows,
    shuffled,
    steps_of_shard,
)
from insitu.grid.layout.permutation import Permutation
from insitu.grid.layout.rebalancing import Move, RebalancePlan, plan_rebalancing
from insitu.grid.layout.restoring import plan_restoring
from insitu.grid.layout.sampling import draw_rows
from insitu.grid.layout.server_places import (
    Endpoint,
    HostAddresses,
    HostPlaces,
    ServerPlaces,
    count_moved,
    find_host_places,
    find_places,
    normalize_address,
)
from insitu.grid.layout.windows import (
    FileOrder,
    WindowBlocks,
    WindowedOrder,
    WindowOrder,
    count_blocks_before,
    rows_before,
)
