"""Pure: decides which server holds which part of which variable, and at which place in the flat buffers.

Whole variables go to the server that has the fewest bytes so far, the largest first. A variable of more than
`min_piece_bytes` is cut by rows (its first axis) into pieces of at least that size, one for each server at
most. `parts` cuts a variable into so many pieces instead, of which a server may get several. With `together`
the first server has all variables whole. The same definitions and the same number of
servers always give the same plan.

All variables of one dtype form a *group*: one flat buffer with the variables back to back, in the order of
their definition. Each server holds its pieces of a group back to back too, in the same order. So a worker
can send what it computes into one flat buffer without rearranging it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from insitu.base.errors import InputError

MIN_PIECE_BYTES = 256 << 10
DTYPES = ("float32", "float64", "float16", "bfloat16")
"""Dtypes that a dense variable may have."""
_MAX_NAME = 1000


def as_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name. Raises InputError unless it is one of DTYPES."""
    if name not in DTYPES:
        raise InputError(f"A variable on parameter servers must be of {', '.join(DTYPES)}. Received: {name}")
    return named_dtype(name)


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name, also of one that only ml_dtypes knows."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class Variable:
    """One dense variable."""

    #: Unique among the variables of a plan; 1 to 1000 characters.
    name: str
    #: Lengths of its axes, in elements; () for a scalar.
    shape: tuple[int, ...]
    #: One of DTYPES.
    dtype: str = "float32"

    def __post_init__(self) -> None:
        as_dtype(self.dtype)
        if not self.name or len(self.name) > _MAX_NAME:
            raise InputError(
                f"A variable's name has 1 to {_MAX_NAME} characters. Received: {self.name[:50]!r}"
            )
        if any(length < 0 for length in self.shape):
            raise InputError(f"A variable's shape has no negative lengths. Received: {self.shape}")

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def row_size(self) -> int:
        """Elements of one row; 1 for a scalar."""
        return math.prod(self.shape[1:]) if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * as_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a variable, on one server. A scalar is one row."""

    #: The variable that it is a part of.
    variable: Variable
    #: Index of the server that holds it.
    server: int
    #: First row.
    start: int
    #: Row after the last.
    stop: int
    #: Start in the group's flat buffer over all servers, in elements.
    offset: int
    #: Start in the group's flat buffer of its server, in elements.
    server_offset: int

    @property
    def size(self) -> int:
        """Elements."""
        return (self.stop - self.start) * self.variable.row_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its axes, in elements."""
        return (self.stop - self.start, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def is_whole(self) -> bool:
        """True if it is all of its variable."""
        return self.size == self.variable.size

    @property
    def name(self) -> str:
        """The variable's name; for a part of it, with its rows: `kernel[0:512]`."""
        return self.variable.name if self.is_whole else f"{self.variable.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class ServerSpan:
    """Elements that are contiguous both in the buffer over all servers and in that of one server."""

    #: Start in the group's flat buffer over all servers, in elements.
    offset: int
    #: Start in the group's flat buffer of the server, in elements.
    server_offset: int
    #: Elements.
    size: int


@dataclass(frozen=True)
class ShardingPlan:
    """The server and the position of each part of each variable."""

    #: All variables, in the order of their definition.
    variables: tuple[Variable, ...]
    #: Number of servers.
    servers: int
    #: In the order of the variables, then of their rows.
    pieces: tuple[Piece, ...]
    #: Whether the first server was made to hold all.
    together: bool = False
    #: The pieces that variables were made to have, by name.
    parts: Mapping[str, int] | None = None

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The dtypes that occur, in the order of their first variable."""
        return tuple(dict.fromkeys(v.dtype for v in self.variables))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of each group over all servers."""
        return {g: sum(v.size for v in self.variables if v.dtype == g) for g in self.groups}

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Start of each variable in its group's flat buffer over all servers, in elements."""
        ends = dict.fromkeys(self.groups, 0)
        starts = {}
        for variable in self.variables:
            starts[variable.name] = ends[variable.dtype]
            ends[variable.dtype] += variable.size
        return starts

    def pieces_of(self, server: int, group: str | None = None) -> tuple[Piece, ...]:
        """Return the pieces that `server` holds, of one group or (None) of all."""
        return tuple(
            p for p in self.pieces if p.server == server and (group is None or p.variable.dtype == group)
        )

    def server_size(self, server: int, group: str) -> int:
        """Return how many elements of `group` a server holds."""
        return sum(p.size for p in self.pieces_of(server, group))

    def spans_of(self, server: int, group: str) -> tuple[ServerSpan, ...]:
        """Return the pieces of `server` that aren't empty, joined if they are contiguous on both sides."""
        if (server, group) not in self._spans:
            self._spans[server, group] = self._join_pieces(server, group)
        return self._spans[server, group]

    @cached_property
    def _spans(self) -> dict[tuple[int, str], tuple[ServerSpan, ...]]:
        """Results of `spans_of`, which each message needs."""
        return {}

    def _join_pieces(self, server: int, group: str) -> tuple[ServerSpan, ...]:
        joined: list[ServerSpan] = []
        for piece in self.pieces_of(server, group):
            if not piece.size:
                continue
            last = joined[-1] if joined else None
            if (
                last
                and last.offset + last.size == piece.offset
                and last.server_offset + last.size == piece.server_offset
            ):
                joined[-1] = ServerSpan(last.offset, last.server_offset, last.size + piece.size)
            else:
                joined.append(ServerSpan(piece.offset, piece.server_offset, piece.size))
        return tuple(joined)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits, equal for equal plans."""
        described = [
            self.servers,
            [[v.name, list(v.shape), v.dtype] for v in self.variables],
            [[p.server, p.start, p.stop] for p in self.pieces],
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def check_min_piece_bytes(given: Any) -> None:
    """Raise InputError unless `given` can be the smallest size of a piece."""
    if not isinstance(given, int) or given < 1:
        raise InputError(f"min_piece_bytes must be a whole number, at least 1. Received: {given!r}")


def plan_sharding(
    variables: Sequence[Variable],
    servers: int,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    *,
    together: bool = False,
    parts: Mapping[str, int] | None = None,
) -> ShardingPlan:
    """Return the plan of `variables` over `servers`. Raises InputError if names repeat, or a number of parts
    is impossible."""
    if servers < 1:
        raise InputError(f"Variables need at least one server. Received: {servers}")
    check_min_piece_bytes(min_piece_bytes)
    names = [v.name for v in variables]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InputError(f"Each variable needs a name of its own. Received twice: {twice!r}")
    sharing = 1 if together else servers
    cuts = [
        (v, start, stop)
        for v in variables
        for start, stop in (
            _cut_rows(v, sharing, min_piece_bytes) if parts is None else _cut_parts(v, parts.get(v.name, 1))
        )
    ]
    servers_of = _balance_load(cuts, sharing)
    ends = dict.fromkeys(DTYPES, 0)
    server_ends = {(server, dtype): 0 for server in range(servers) for dtype in DTYPES}
    pieces = []
    for (variable, start, stop), server in zip(cuts, servers_of, strict=True):
        dtype = variable.dtype
        piece = Piece(variable, server, start, stop, ends[dtype], server_ends[server, dtype])
        ends[dtype] += piece.size
        server_ends[server, dtype] += piece.size
        pieces.append(piece)
    return ShardingPlan(tuple(variables), servers, tuple(pieces), together, parts)


def _cut_rows(variable: Variable, servers: int, min_bytes: int) -> list[tuple[int, int]]:
    """Return the half-open intervals of rows that a variable is cut into."""
    rows = variable.shape[0] if variable.shape else 1
    parts = min(servers, max(1, variable.nbytes // min_bytes), max(1, rows))
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def _cut_parts(variable: Variable, parts: int) -> list[tuple[int, int]]:
    """Return the half-open intervals of rows of so many parts, the first ones a row longer if they don't
    divide evenly. There are no more parts than rows."""
    if parts < 1:
        raise InputError(f"A variable has at least 1 part. Received: {parts} for {variable.name!r}")
    rows = variable.shape[0] if variable.shape else 1
    parts = min(parts, max(1, rows))
    base, longer = divmod(rows, parts)
    starts = [part * base + min(part, longer) for part in range(parts + 1)]
    return list(pairwise(starts))


def _balance_load(cuts: Sequence[tuple[Variable, int, int]], servers: int) -> list[int]:
    """Return the server of each cut: the largest first, each to the one with the fewest bytes, ties to the
    first."""
    sizes = [(stop - start) * v.row_size * as_dtype(v.dtype).itemsize for v, start, stop in cuts]
    load = [0] * servers
    chosen = [0] * len(cuts)
    for index in sorted(range(len(cuts)), key=lambda i: (-sizes[i], i)):
        server = min(range(servers), key=lambda s: (load[s], s))
        chosen[index] = server
        load[server] += sizes[index]
    return chosen


def to_json(plan: ShardingPlan, min_piece_bytes: int) -> dict[str, Any]:
    """Return what another process needs to make the same plan."""
    return {
        "variables": [[v.name, list(v.shape), v.dtype] for v in plan.variables],
        "servers": plan.servers,
        "min_piece_bytes": min_piece_bytes,
        "together": plan.together,
        **({} if plan.parts is None else {"parts": dict(plan.parts)}),
        "fingerprint": plan.fingerprint,
    }


def from_json(data: Mapping[str, Any]) -> ShardingPlan:
    """Return the plan that `to_json` described. Raises InputError if this process comes to another one."""
    variables = [Variable(str(n), tuple(int(i) for i in s), str(d)) for n, s, d in data["variables"]]
    given = data.get("parts")
    plan = plan_sharding(
        variables,
        int(data["servers"]),
        int(data["min_piece_bytes"]),
        together=bool(data["together"]),
        parts=None if given is None else {str(name): int(parts) for name, parts in given.items()},
    )
    if plan.fingerprint != data["fingerprint"]:
        raise InputError(
            f"Workers and servers must plan alike: this process comes to {plan.fingerprint}. Received: "
            f"{data['fingerprint']}. Install the same version of insitu on all nodes"
        )
    return plan


def describe_difference(old: ShardingPlan, new: ShardingPlan) -> str:
    """Return the first thing in which `new` differs from `old`, in words; "" if nothing does."""
    if old.servers != new.servers:
        return f"{new.servers} servers instead of {old.servers}"
    before = {v.name: v for v in old.variables}
    after = {v.name: v for v in new.variables}
    for name in before:
        if name not in after:
            return f"variable {name!r} is missing"
    for name, variable in after.items():
        known = before.get(name)
        if known is None:
            return f"variable {name!r} is new"
        if known != variable:
            return (
                f"variable {name!r} is {variable.dtype}{list(variable.shape)} "
                f"instead of {known.dtype}{list(known.shape)}"
            )
    if old.fingerprint != new.fingerprint:
        return "the variables come in another order, or in pieces of another size"
    return ""
