"""Plan how arrays are reduced: the order of sums, who reduces what, and which way is cheapest. Pure.

Imports nothing else of the exchange. Begin reading with `transport.py`, the seam, then `arithmetic.py`.
"""

from insitu.exchange.plan.arithmetic import (
    PAGE,
    Factors,
    ReduceOp,
    Reducer,
    check_reducible,
    check_weights,
    compute_factors,
    split_by_pages,
    split_chunks,
)
from insitu.exchange.plan.costs import (
    MAX_PROBE_BYTES,
    MEASURED,
    AlgorithmName,
    Costs,
    LinearCost,
    choose_algorithm,
    find_chain_order,
    find_hub,
)
from insitu.exchange.plan.reduce_plan import (
    SCRATCH_BYTES,
    ReducePiece,
    ReducePlan,
)
from insitu.exchange.plan.schedule import (
    Schedule,
    ScheduleStep,
    Transfer,
)
from insitu.exchange.plan.topology import (
    HostTopology,
)
from insitu.exchange.plan.transport import (
    GroupConfig,
    MemberLost,
    Members,
    Mismatch,
    Reduction,
    RunReduction,
    Transport,
    WaitStats,
    mismatch_error,
)
