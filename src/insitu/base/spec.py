"""Frozen values that all rooms share. They validate when they are made and hold no behaviour of a room.

Each error message gives the rule, the value received and, unless it is obvious, the fix. Intervals are
half-open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NewType, get_args

from insitu.base.errors import InputError, JobSpecError

NodeId = NewType("NodeId", str)
CopyState = Literal["live", "copying", "lost"]
"""State of a copy of a partition. `live`: whole and verified. `copying`: its bytes are on the way. `lost`:
its node isn't there."""
COPY_STATES: tuple[CopyState, ...] = get_args(CopyState)
Role = Literal["chief", "worker", "ps", "evaluator"]
ROLES: tuple[Role, ...] = get_args(Role)

CODECS = ("lz4", "zstd")
"""Compression methods for the blocks of a cache."""
NO_CACHE = "-"
"""Stands in a job for the name of its cache if it has none: its script brings its own data."""
_CACHE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_SIMPLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_cache_name(name: str) -> str:
    """Return `name`. Raises InputError unless it is words of [A-Za-z0-9_.-] joined by '/'."""
    if not _CACHE_NAME.fullmatch(name) or len(name) > 200:
        raise InputError(
            f"A cache's name is made of letters, digits, '_', '.', '-', in parts joined by '/', none of "
            f"which starts with '.' or '-', 200 characters at most. Received: {name!r}"
        )
    return name


def split_version(text: str) -> tuple[str, int | None]:
    """Return the cache and the version that `text` names: `orders@3`, or `orders` for the latest (None).

    Raises InputError if the version isn't a number from 1 on.
    """
    name, separator, version = text.rpartition("@")
    if not separator or "://" in text:
        return text, None
    if not (version.isascii() and version.isdigit() and 0 < int(version) < 1 << 63):
        raise InputError(
            f"A version of a cache is named as CACHE@NUMBER, such as orders@3. Received: {text!r}. Give a "
            f"number, or leave @ out for the latest version"
        )
    return name, int(version)


def is_simple_name(name: str) -> bool:
    """Return whether `name` is one word of [A-Za-z0-9_.-], as names of jobs and nodes are."""
    return bool(_SIMPLE_NAME.fullmatch(name)) and len(name) <= 100


def check_simple_name(what: str, name: str) -> str:
    """Return `name`. Raises InputError unless it is one word of [A-Za-z0-9_.-]."""
    if not is_simple_name(name):
        raise InputError(
            f"{what} is made of letters, digits, '_', '.', '-', starts with a letter, a digit or '_', and "
            f"has 100 characters at most. Received: {name!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a cache. Every row holds one tensor."""

    #: Unique among the columns of a cache.
    name: str
    #: NumPy's name, such as "uint8", "float32" or "bool", or "str" for text. "int64[*]" is ragged: a list of
    #: any number of such values in each row.
    dtype: str
    #: The shape of a row's tensor: () for a scalar, for text and for a list.
    shape: tuple[int, ...] = ()
    #: Arrow's type if the numbers stand for times, such as "timestamp[us, tz=UTC]": microseconds since 1970.
    logical: str = ""


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition of one version of a cache. Written by the import."""

    #: The partition's number in the cache, from 0.
    index: int
    #: Rows in the partition.
    rows: int
    #: The size of the file.
    bytes: int
    #: Checksum of the whole file, as `algorithm:hex`.
    checksum: str
    #: The nodes that hold a copy: the primary first, then the backups. Distinct, at least one.
    owners: tuple[NodeId, ...]
    #: The size that the file would have without compression; 0: nothing is compressed.
    raw_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.owners or len(set(self.owners)) != len(self.owners):
            raise ValueError(f"owners must be distinct and not empty. Received: {self.owners!r}")


@dataclass(frozen=True, slots=True)
class PlacedCopy:
    """One copy of a partition of one version of a cache."""

    #: The partition's number.
    partition: int
    #: The node whose store has the copy, or will have it.
    node: NodeId
    #: Written by the import, and by what moves the copy.
    state: CopyState = "live"

    def __post_init__(self) -> None:
        if self.state not in COPY_STATES:
            raise ValueError(f"a copy is {', '.join(COPY_STATES)}. Received: {self.state!r}")


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One version of a cache: immutable once published."""

    #: The name of the cache, such as "digits/train".
    name: str
    #: Counted from 1; each import into the cache adds one.
    version: int
    #: The columns, in the order of the sources.
    columns: tuple[Column, ...]
    #: `partitions[i].index == i`.
    partitions: tuple[PartitionInfo, ...]
    #: Further copies of each partition.
    backups: int
    #: The column whose hash chose each row's partition; None: the row's index in the sources.
    key: str | None
    #: Seconds since 1970.
    created: float
    #: `labels[i]` is the class of the rows with i in column `label`; empty unless they come from file names.
    labels: tuple[str, ...] = ()
    #: Rows of each block of a partition but its last; 0: a partition is one block.
    block_rows: int = 0
    #: The compression of blocks; None: nothing is compressed.
    codec: str | None = None
    #: (bytes without compression, bytes in the files) of each of `columns`; empty without a codec.
    column_bytes: tuple[tuple[int, int], ...] = ()
    #: Names the rows that another system gave, as JSON; None: they come from files.
    origin: Mapping[str, Any] | None = None
    #: The user's note on this version; empty: none.
    note: str = ""

    def __post_init__(self) -> None:
        if self.name != NO_CACHE:
            check_cache_name(self.name)
        if self.codec not in (None, *CODECS) or (self.codec and len(self.column_bytes) != len(self.columns)):
            raise ValueError(f"a codec is one of {', '.join(CODECS)}. Received: {self.codec!r}")
        if [p.index for p in self.partitions] != list(range(len(self.partitions))):
            raise ValueError("partitions must be numbered from 0 without gaps")

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.partitions)

    @property
    def bytes(self) -> int:
        """Bytes of all partitions, each counted once (backups left out)."""
        return sum(p.bytes for p in self.partitions)

    @property
    def raw_bytes(self) -> int:
        """Bytes that all partitions would have without compression. The order of rows may follow from it."""
        return sum(p.raw_bytes or p.bytes for p in self.partitions)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if self.codec is None:  # so that an insitu that knows no compression can read it
            del data["codec"], data["column_bytes"]
            for partition in data["partitions"]:
                del partition["raw_bytes"]
        for column in data["columns"]:
            if not column["logical"]:
                del column["logical"]
        if self.origin is None:  # in the form that it always had
            del data["origin"]
        if not self.note:
            del data["note"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CacheSpec:
        columns = tuple(
            Column(c["name"], c["dtype"], tuple(c["shape"]), c.get("logical", "")) for c in data["columns"]
        )
        partitions = tuple(PartitionInfo(**{**p, "owners": tuple(p["owners"])}) for p in data["partitions"])
        changed = {"columns": columns, "partitions": partitions, "labels": tuple(data.get("labels", ()))}
        sizes = data.get("column_bytes", ())
        changed["column_bytes"] = tuple((int(raw), int(stored)) for raw, stored in sizes)
        return cls(**{**data, **changed})


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The partitions of each shard of a job.

    Fixed from the job's start to its end, across restarts and new imports of the cache.
    """

    #: The name of the cache.
    cache: str
    #: The version of the cache that the job reads.
    version: int
    #: `shards[s]` holds partition indices in ascending order. Each partition is in one shard.
    shards: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The options of a job and what follows from them. Written once, when the job is made."""

    #: Unique in this $INSITU_HOME: `name`, "-" and six random hex digits.
    job_id: str
    #: The beginning of `job_id`.
    name: str
    #: The name of the cache to train on; NO_CACHE for a script that brings its own data.
    cache: str
    #: JOB_CMD and JOB_ARGS, run in the job's copy of JOB_DIR.
    command: tuple[str, ...]
    #: Worker tasks at the start.
    workers: int
    #: Shards from start to end, at least `workers`.
    shards: int
    #: Parameter server tasks.
    ps: int = 0
    #: How many other servers mirror each server; less than `ps`.
    ps_backups: int = 0
    #: Whether there is a chief task beside the workers.
    chief: bool = False
    #: Whether there is an evaluator task.
    evaluator: bool = False
    #: Seconds that the evaluator has to end by itself once training is over.
    evaluator_grace: float = 30.0
    #: The name of what runs the tasks.
    engine: str = "local"
    #: The plug-in that makes the places in which hosts run the tasks; "": their agents do.
    starter: str = ""
    #: What was asked of that plug-in, as KEY=VALUE.
    pod: tuple[str, ...] = ()
    #: How often a failed job is started again.
    max_restarts: int = 3
    #: All randomness follows from it; in [0, 2**31).
    seed: int = 0
    #: Backend threads of each replica. Part of the job, since it changes the backend's own rounding.
    threads: int = 1
    #: Seconds without progress after which a job has failed.
    stall_timeout: float = 600.0
    #: Seconds since 1970.
    created: float = 0.0
    #: Variables of the tasks' environment, with the device settings of `insitu.base.config`.
    settings: Mapping[str, str] = field(default_factory=dict)
    #: The job's answer to a task that dies while the others can continue.
    on_loss: Literal["replace", "adopt", "restart"] = "replace"
    #: Whether tasks follow their data when it moves while the job runs.
    on_rebalance: Literal["follow", "stay"] = "follow"
    #: Processes that stand by to replace a task; None: one if there is memory for it.
    standby: int | None = None
    #: Whether tasks keep checkpoints in memory, too.
    memory_checkpoint: bool = False
    #: GPUs that each task that trains has for itself; 0: tasks see those that the shell sees.
    gpus_per_worker: int = 0
    #: MiB of main memory that the node of a task that trains must have free for it at the start; 0: any.
    memory_per_worker: int = 0
    #: Processors of its node that each task that trains has for itself; 0: any.
    cores_per_worker: int = 0
    #: After how many epochs rows are read from another system again; 0: never.
    refresh: int = 0
    #: The nodes that tasks may run on; empty: all.
    nodes: tuple[NodeId, ...] = ()

    def __post_init__(self) -> None:
        check_simple_name("A job's id", self.job_id)
        if self.cache != NO_CACHE:
            check_cache_name(self.cache)
        for option, value, least in (("workers", self.workers, 1), ("shards", self.shards, self.workers)):
            if value < least:
                raise JobSpecError(f"--{option} must be at least {least}. Received: {value}")
        if self.ps_backups and self.ps_backups >= self.ps:
            raise JobSpecError(
                "--ps-backups must be below --ps: each ps task is mirrored on so many others. "
                f"Received: --ps-backups {self.ps_backups} and --ps {self.ps}"
            )
        if self.memory_checkpoint and (self.workers < 2 or self.ps):
            raise JobSpecError(
                "--memory-checkpoint is for workers that train in step, two at least: one writes checkpoints "
                "to disk, the others keep theirs in memory. "
                f"Received: {self.workers} workers, {self.ps} ps tasks"
            )
        if self.gpus_per_worker and self.standby:
            raise JobSpecError(
                "A process that stands by has no GPUs yet that it could load its libraries for. "
                f"Received: --standby {self.standby} and --gpus-per-worker {self.gpus_per_worker}. "
                "Leave out --standby"
            )
        if not self.command:
            raise JobSpecError("JOB_CMD is missing: say what to run in JOB_DIR, such as train.py")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        lists = {"command": tuple(data["command"]), "nodes": tuple(data.get("nodes", ()))}
        lists["pod"] = tuple(data.get("pod", ()))
        # Versions before kept these here.
        former = ("environment", "on_take_over")
        return cls(**{name: value for name, value in {**data, **lists}.items() if name not in former})


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """A process of a job by role and index; `str` gives the form that users see: `worker:0`."""

    #: One of ROLES.
    role: Role
    #: Its number among the tasks of the role, from 0.
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
        """Return the task that `text` names: `worker:0`, or `chief` for `chief:0`."""
        role, _, index = text.partition(":")
        if role not in ROLES or not (index or "0").isdecimal():
            raise InputError(
                f"A task is ROLE:INDEX with a role of {', '.join(ROLES)}, such as worker:0. "
                f"Received: {text!r}"
            )
        return cls(role, int(index or 0))


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """The node and the shards of a task."""

    #: The task.
    task: TaskId
    #: The node that it runs on.
    node: NodeId
    #: Shards to train on, ascending. None for ps, evaluator, and a chief beside workers.
    shards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout of a job on nodes."""

    #: In order of role (as in ROLES), then index.
    tasks: tuple[TaskSpec, ...]
    #: The partitions of each shard.
    shard_map: ShardMap
    #: The home node of each shard, which holds most of its rows. Length: number of shards.
    home_nodes: tuple[NodeId, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a cluster."""

    #: In order, distinct. One node, `node-0`, if none were brought up.
    nodes: tuple[NodeId, ...] = (NodeId("node-0"),)

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise InputError(f"A cluster has at least one node, each named once. Received: {self.nodes!r}")
        for node in self.nodes:
            check_simple_name("A node's name", node)
