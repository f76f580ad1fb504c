"""Frozen values that every room speaks in. They validate when they are made and hold no behaviour of a room.

Each message says the rule, the value received and, where it isn't obvious, the fix. Intervals are
half-open.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NewType, get_args

from insitu.errors import InputError, JobSpecError

NodeId = NewType("NodeId", str)
Role = Literal["chief", "worker", "ps", "evaluator"]
ROLES: tuple[Role, ...] = get_args(Role)

_CACHE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_SIMPLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_cache_name(name: str) -> str:
    """`name` itself. Raises InputError unless it is words of [A-Za-z0-9_.-] joined by '/'."""
    if not _CACHE_NAME.fullmatch(name) or len(name) > 200:
        raise InputError(
            f"A cache's name is made of letters, digits, '_', '.', '-', in parts joined by '/', none of "
            f"which starts with '.' or '-', 200 characters at most. Received: {name!r}"
        )
    return name


def is_simple_name(name: str) -> bool:
    """Whether `name` is one word of [A-Za-z0-9_.-], as names of jobs and nodes are."""
    return bool(_SIMPLE_NAME.fullmatch(name)) and len(name) <= 100


def check_simple_name(what: str, name: str) -> str:
    """`name` itself. Raises InputError unless it is one word of [A-Za-z0-9_.-]."""
    if not is_simple_name(name):
        raise InputError(
            f"{what} is made of letters, digits, '_', '.', '-', starts with a letter, a digit or '_', and "
            f"has 100 characters at most. Received: {name!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a cache. Every row holds a `dtype` tensor of `shape`; () is a scalar.

    `dtype` is NumPy's name of it ("uint8", "float32", "int64", "bool"), or "str" for text, whose shape
    is ().
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition of one version of a cache.

    `owners` names nodes, the primary first, then its backups; never empty, never twice the same.
    `checksum` is that of the whole file, as `algorithm:hex`. `bytes` is the file's size.
    """

    index: int
    rows: int
    bytes: int
    checksum: str
    owners: tuple[NodeId, ...]

    def __post_init__(self) -> None:
        if not self.owners or len(set(self.owners)) != len(self.owners):
            raise ValueError(f"owners must be distinct and not empty. Received: {self.owners!r}")


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One version of a cache: immutable once published.

    `partitions[i].index == i`. `key` is the column whose hash chose each row's partition; None means the
    row's index in the source did. `labels[i]` names the class whose rows hold i in column `label`; empty
    where the labels did not come from files' names. `created` is in seconds since 1970.
    """

    name: str
    version: int
    columns: tuple[Column, ...]
    partitions: tuple[PartitionInfo, ...]
    backups: int
    key: str | None
    created: float
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_cache_name(self.name)
        if [p.index for p in self.partitions] != list(range(len(self.partitions))):
            raise ValueError("partitions must be numbered from 0 without gaps")

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.partitions)

    @property
    def bytes(self) -> int:
        """Bytes of all partitions, each counted once (backups left out)."""
        return sum(p.bytes for p in self.partitions)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CacheSpec:
        columns = tuple(Column(c["name"], c["dtype"], tuple(c["shape"])) for c in data["columns"])
        partitions = tuple(PartitionInfo(**{**p, "owners": tuple(p["owners"])}) for p in data["partitions"])
        changed = {"columns": columns, "partitions": partitions, "labels": tuple(data.get("labels", ()))}
        return cls(**{**data, **changed})


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Which partitions of one version of a cache make up each shard of a job.

    `shards[s]` holds partition indices in ascending order; together the shards hold each partition once.
    Fixed for a job's whole life, across restarts and re-imports of the cache.
    """

    cache: str
    version: int
    shards: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What `insitu start` was asked for. Durations are in seconds.

    `shards` is the number of shards from start to end (workers asked for, unless said otherwise);
    `threads` the number of backend threads of each replica: it is part of the job, since it changes the
    backend's own rounding. `command` is JOB_CMD and JOB_ARGS, run in the job's copy of JOB_DIR. `settings`
    are variables of the tasks' environment: what `insitu.config` asks of devices.
    `on_loss` is what is done about a task that dies while the others can go on; `standby` how many processes
    stand by for that, None: one where there is memory for it; `memory_checkpoint` whether tasks keep
    checkpoints in memory too.
    """

    job_id: str
    name: str
    cache: str
    command: tuple[str, ...]
    workers: int
    shards: int
    ps: int = 0
    ps_backups: int = 0
    chief: bool = False
    evaluator: bool = False
    engine: str = "local"
    max_restarts: int = 3
    seed: int = 0
    threads: int = 1
    stall_timeout: float = 600.0
    created: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)
    on_loss: Literal["replace", "adopt", "restart"] = "replace"
    standby: int | None = None
    memory_checkpoint: bool = False

    def __post_init__(self) -> None:
        check_simple_name("A job's id", self.job_id)
        check_cache_name(self.cache)
        rules: tuple[tuple[str, float, float], ...] = (
            ("--workers", self.workers, 1),
            ("--shards", self.shards, self.workers),
            ("--ps", self.ps, 0),
            ("--ps-backups", self.ps_backups, 0),
            ("--max-restarts", self.max_restarts, 0),
            ("--threads", self.threads, 1),
            ("--standby", 0 if self.standby is None else self.standby, 0),
        )
        for option, value, least in rules:
            if value < least:
                raise JobSpecError(f"{option} must be at least {least:g}. Received: {value:g}")
        if self.ps_backups and self.ps_backups >= self.ps:
            raise JobSpecError(
                "--ps-backups must be below --ps: each ps task is mirrored on so many others. "
                f"Received: --ps-backups {self.ps_backups} and --ps {self.ps}"
            )
        if not (math.isfinite(self.stall_timeout) and self.stall_timeout > 0):
            raise JobSpecError(f"--stall-timeout must be positive and finite. Received: {self.stall_timeout}")
        if self.on_loss not in ("replace", "adopt", "restart"):
            raise JobSpecError(f"--on-loss must be replace, adopt or restart. Received: {self.on_loss}")
        if self.memory_checkpoint and (self.workers < 2 or self.ps):
            raise JobSpecError(
                "--memory-checkpoint is for workers that train in step, two at least: one writes checkpoints "
                "to disk, the others keep theirs in memory. "
                f"Received: {self.workers} workers, {self.ps} ps tasks"
            )
        if not 0 <= self.seed < 2**31:
            raise JobSpecError(f"--seed must be in [0, 2**31). Received: {self.seed}")
        if not self.command:
            raise JobSpecError("JOB_CMD is missing: say what to run in JOB_DIR, such as train.py")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        return cls(**{**data, "command": tuple(data["command"])})


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """A process of a job by role and index; `str` gives the form that users see: `worker:0`."""

    role: Role
    index: int

    def __post_init__(self) -> None:
        if self.role not in ROLES or self.index < 0:
            raise InputError(
                f"A task is ROLE:INDEX with a role of {', '.join(ROLES)}. Received: {self.role}:{self.index}"
            )

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """The task that `text` names: `worker:0`, or `chief` for `chief:0`."""
        role, _, index = text.partition(":")
        if role not in ROLES or not (index or "0").isdecimal():
            raise InputError(
                f"A task is ROLE:INDEX with a role of {', '.join(ROLES)}, such as worker:0. "
                f"Received: {text!r}"
            )
        return cls(role, int(index or 0))


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Where a task runs and which shards it trains on: none for ps, evaluator, and a chief beside workers."""

    task: TaskId
    node: NodeId
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """A job laid out on nodes. `tasks` in order of role (as in ROLES), then index."""

    tasks: tuple[TaskSpec, ...]
    shard_map: ShardMap
    home_nodes: tuple[NodeId, ...] = field(default=())
    """The node that each shard is at home on: where most of its rows lie. Length: number of shards."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a cluster, in order. One node, `node-0`, where none were brought up."""

    nodes: tuple[NodeId, ...] = (NodeId("node-0"),)

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise InputError(f"A cluster has at least one node, each named once. Received: {self.nodes!r}")
        for node in self.nodes:
            check_simple_name("A node's name", node)
