"""Decide for parameter servers: who holds what, when pushes become an update, what a message holds. Pure.

Imports nothing else of `parameters`. Begin reading with `modes.py`.
"""

from insitu.parameters.rules import modes, sharding_plan
from insitu.parameters.rules.consistent_cut import (
    DENSE_STREAM,
    ConsistentCut,
    plan_cut,
)
from insitu.parameters.rules.hashing import (
    Initializer,
    assign_servers,
    mix64,
    stable_hash,
)
from insitu.parameters.rules.modes import (
    ConsistencyPolicy,
    Mode,
    PushEvent,
    PushState,
)
from insitu.parameters.rules.push_stats import (
    PushStats,
)
from insitu.parameters.rules.sharding_plan import (
    MIN_PIECE_BYTES,
    Piece,
    ShardingPlan,
    Variable,
    as_dtype,
    check_min_piece_bytes,
    describe_difference,
    plan_sharding,
)
from insitu.parameters.rules.wire import (
    FAILURE,
    HEADER,
    PROTOCOL_VERSION,
    REPLY,
    REQUEST,
    Array,
    BufferRef,
    MalformedMessage,
    Message,
    decode,
    encode,
    make_failure,
    read_header,
    wire_dtype,
)
