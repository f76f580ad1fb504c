"""Pure: which server holds which part of which variable, and where it lies in everybody's buffers.

Whole variables go to the server that has the fewest bytes so far, the largest first; a variable of more than
`min_piece_bytes` is cut by rows (its first axis) into as many pieces as servers can share it, none smaller
than that. Where all must be in one place, *together*, the first server has them whole. The same definitions
and number of servers always give the same layout.

All variables of one dtype form a *group*: one flat buffer with the variables back to back, in the order of
their definition. Each server holds its pieces of a group back to back too, in the same order. So what a
worker computes into one flat buffer needs no rearranging before it's sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from insitu.errors import InputError

MIN_PIECE_BYTES = 256 << 10
DTYPES = ("float32", "float64", "float16", "bfloat16")


def as_dtype(name: str) -> np.dtype[Any]:
    """The dtype of one of DTYPES. Raises InputError for anything else."""
    if name not in DTYPES:
        raise InputError(f"A variable on parameter servers must be of {', '.join(DTYPES)}. Received: {name}")
    return named_dtype(name)


def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name, also where only ml_dtypes knows it."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class Variable:
    """One dense variable. `shape` in elements; `dtype` one of DTYPES."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        as_dtype(self.dtype)
        if not self.name or len(self.name) > 1000:
            raise InputError(f"A variable's name has 1 to 1000 characters. Received: {self.name[:50]!r}")
        if any(length < 0 for length in self.shape):
            raise InputError(f"A variable's shape has no negative lengths. Received: {self.shape}")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def row_size(self) -> int:
        """Elements of one row; of all where there are no rows."""
        return math.prod(self.shape[1:]) if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.size * as_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a variable, on one server. A variable without axes is one row.

    `offset` is where it begins in the group's flat buffer over all servers, `own` in that of its server, both
    in elements.
    """

    variable: Variable
    server: int
    start: int
    stop: int
    offset: int
    own: int

    @property
    def size(self) -> int:
        return (self.stop - self.start) * self.variable.row_size

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.variable.shape[1:]) if self.variable.shape else ()

    @property
    def whole(self) -> bool:
        return self.size == self.variable.size

    @property
    def name(self) -> str:
        """The variable's name; of a part, with its rows: `kernel[0:512]`."""
        return self.variable.name if self.whole else f"{self.variable.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Span:
    """Elements that lie together both in the buffer of all servers and in that of one: `size` of them, from
    `offset` there and from `own` here."""

    offset: int
    own: int
    size: int


@dataclass(frozen=True)
class ShardingPlan:
    """Where everything is. `pieces` are in the order of the variables, then of the rows."""

    variables: tuple[Variable, ...]
    servers: int
    pieces: tuple[Piece, ...]
    together: bool = False

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
        """Where each variable begins in its group, in elements."""
        ends = dict.fromkeys(self.groups, 0)
        found = {}
        for variable in self.variables:
            found[variable.name] = ends[variable.dtype]
            ends[variable.dtype] += variable.size
        return found

    def of(self, server: int, group: str | None = None) -> tuple[Piece, ...]:
        """The pieces that `server` holds, of one group or of all."""
        return tuple(
            p for p in self.pieces if p.server == server and (group is None or p.variable.dtype == group)
        )

    def own_size(self, server: int, group: str) -> int:
        """Elements of `group` that `server` holds."""
        return sum(p.size for p in self.of(server, group))

    def own_bytes(self, server: int) -> int:
        return sum(p.size * as_dtype(p.variable.dtype).itemsize for p in self.of(server))

    def spans(self, server: int, group: str) -> tuple[Span, ...]:
        """The pieces of `server`, joined where they lie together on both sides; empty ones left out."""
        if (server, group) not in self._spans:
            self._spans[server, group] = self._join(server, group)
        return self._spans[server, group]

    @cached_property
    def _spans(self) -> dict[tuple[int, str], tuple[Span, ...]]:
        """What was asked for before: each message asks."""
        return {}

    def _join(self, server: int, group: str) -> tuple[Span, ...]:
        joined: list[Span] = []
        for piece in self.of(server, group):
            if not piece.size:
                continue
            last = joined[-1] if joined else None
            if last and last.offset + last.size == piece.offset and last.own + last.size == piece.own:
                joined[-1] = Span(last.offset, last.own, last.size + piece.size)
            else:
                joined.append(Span(piece.offset, piece.own, piece.size))
        return tuple(joined)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts; 16 hex digits."""
        told = [
            self.servers,
            [[v.name, list(v.shape), v.dtype] for v in self.variables],
            [[p.server, p.start, p.stop] for p in self.pieces],
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def check_min_piece_bytes(given: Any) -> None:
    """Raises InputError for what is no size of a piece."""
    if not isinstance(given, int) or given < 1:
        raise InputError(f"min_piece_bytes must be a whole number, at least 1. Received: {given!r}")


def plan_sharding(
    variables: Sequence[Variable],
    servers: int,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    *,
    together: bool = False,
) -> ShardingPlan:
    """The layout of `variables` over `servers`. Raises InputError where names repeat."""
    if servers < 1:
        raise InputError(f"Variables need at least one server. Received: {servers}")
    check_min_piece_bytes(min_piece_bytes)
    names = [v.name for v in variables]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InputError(f"Each variable needs a name of its own. Received twice: {twice!r}")
    sharing = 1 if together else servers
    cuts = [(v, start, stop) for v in variables for start, stop in _rows(v, sharing, min_piece_bytes)]
    servers_of = _spread(cuts, sharing)
    whole = dict.fromkeys(DTYPES, 0)
    own = {(server, dtype): 0 for server in range(servers) for dtype in DTYPES}
    pieces = []
    for (variable, start, stop), server in zip(cuts, servers_of, strict=True):
        dtype = variable.dtype
        piece = Piece(variable, server, start, stop, whole[dtype], own[server, dtype])
        whole[dtype] += piece.size
        own[server, dtype] += piece.size
        pieces.append(piece)
    return ShardingPlan(tuple(variables), servers, tuple(pieces), together)


def _rows(variable: Variable, servers: int, least: int) -> list[tuple[int, int]]:
    """Half-open intervals of rows, the cuts of one variable."""
    rows = variable.shape[0] if variable.shape else 1
    parts = min(servers, max(1, variable.nbytes // least), max(1, rows))
    return [(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]


def _spread(cuts: Sequence[tuple[Variable, int, int]], servers: int) -> list[int]:
    """The server of each cut: the largest first, each to the one with the fewest bytes, ties to the first."""
    sizes = [(stop - start) * v.row_size * as_dtype(v.dtype).itemsize for v, start, stop in cuts]
    load = [0] * servers
    chosen = [0] * len(cuts)
    for index in sorted(range(len(cuts)), key=lambda i: (-sizes[i], i)):
        server = min(range(servers), key=lambda s: (load[s], s))
        chosen[index] = server
        load[server] += sizes[index]
    return chosen


def to_json(layout: ShardingPlan, min_piece_bytes: int) -> dict[str, Any]:
    """What another process needs to make the same layout."""
    return {
        "variables": [[v.name, list(v.shape), v.dtype] for v in layout.variables],
        "servers": layout.servers,
        "min_piece_bytes": min_piece_bytes,
        "together": layout.together,
        "fingerprint": layout.fingerprint,
    }


def from_json(data: Mapping[str, Any]) -> ShardingPlan:
    """Raises InputError where the layout that comes out is another one than `to_json` was given."""
    variables = [Variable(str(n), tuple(int(i) for i in s), str(d)) for n, s, d in data["variables"]]
    layout = plan_sharding(
        variables, int(data["servers"]), int(data["min_piece_bytes"]), together=bool(data["together"])
    )
    if layout.fingerprint != data["fingerprint"]:
        raise InputError("The same definitions give another layout here: the versions of insitu differ")
    return layout


def difference(old: ShardingPlan, new: ShardingPlan) -> str:
    """The first thing in which `new` differs from `old`, in words; empty where nothing does."""
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
