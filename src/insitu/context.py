"""Reads a task's environment. Outside a job the same script is one replica over everything."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from insitu.cluster_by_hand import HandMadeCluster, find_secret, read_cluster
from insitu.errors import InputError
from insitu.paths import HOME_ENV, JobPaths, Paths, default_home
from insitu.spec import NodeId, TaskId

JOB_ID_ENV = "INSITU_JOB_ID"
CACHE_ENV = "INSITU_CACHE"
TASK_ENV = "INSITU_TASK"
SHARDS_ENV = "INSITU_SHARDS"
NODE_ENV = "INSITU_NODE"
SEED_ENV = "INSITU_SEED"
ATTEMPT_ENV = "INSITU_ATTEMPT"
GENERATION_ENV = "INSITU_GENERATION"
PS_BACKUPS_ENV = "INSITU_PS_BACKUPS"
STALL_TIMEOUT_ENV = "INSITU_STALL_TIMEOUT"
MEMORY_CHECKPOINT_ENV = "INSITU_MEMORY_CHECKPOINT"
TF_CONFIG_ENV = "TF_CONFIG"
REFRESH_ENV = "INSITU_REFRESH"
ALLOW_MIXED_ENV = "INSITU_ALLOW_MIXED_PROCESSORS"
"""1: the hosts of a job may round differently."""
GPUS_ENV = "INSITU_GPUS"
"""How many GPUs a task is given, in jobs that count them."""
GPU_NUMBERS_ENV = "INSITU_GPU_NUMBERS"
"""The GPUs of a host out of which a task gets its own, by number; unset: all of them."""

CONTRACT_ENVS = frozenset(
    {
        *(HOME_ENV, JOB_ID_ENV, CACHE_ENV, TASK_ENV, SHARDS_ENV, NODE_ENV, SEED_ENV, ATTEMPT_ENV),
        *(GENERATION_ENV, STALL_TIMEOUT_ENV, MEMORY_CHECKPOINT_ENV, TF_CONFIG_ENV, REFRESH_ENV),
    }
)
"""Variables that a script finds in its environment; they are read by nothing else, and not before it runs."""

_FIRST_WORKER = TaskId("worker", 0)


@dataclass(frozen=True, slots=True)
class Context:
    """The identity of this process, read from its environment."""

    #: Names below $INSITU_HOME.
    paths: Paths
    #: The job's id; None outside a job.
    job_id: str | None = None
    #: Role and index of this task.
    task: TaskId = _FIRST_WORKER
    #: Name of the cache that the job was started on; None outside a job.
    cache: str | None = None
    #: The shards that this task trains on.
    shards: tuple[int, ...] = (0,)
    #: Number of shards of the whole job.
    num_shards: int = 1
    #: The node that the task runs on; None outside a cluster.
    node: NodeId | None = None
    #: Addresses of all worker tasks by index, as `host:port`; empty outside a job.
    workers: tuple[str, ...] = ()
    #: Addresses of all ps tasks by index.
    servers: tuple[str, ...] = ()
    #: Other ps tasks that mirror each one.
    server_backups: int = 0
    #: Whether the job has a chief task beside the workers.
    has_chief: bool = False
    #: All randomness follows from it.
    seed: int = 0
    #: Number of this task's incarnation, from 1, as INSITU_ATTEMPT has it.
    incarnation: int = 1
    #: Seconds without progress after which the job has failed.
    stall_timeout: float = 600.0
    #: That of the roster that the task was launched for; 0 outside a job.
    generation: int = 0
    #: Replicas that a strategy with several devices splits each shard of the job into.
    replicas_per_shard: int = 1
    #: Whether the task keeps checkpoints in memory, too.
    memory_checkpoint: bool = False
    #: On hosts, after how many epochs the job's supervisor has rows read again; 0: it doesn't.
    refresh: int = 0
    #: Outside a job, the secret that processes of one script share; None: there is but one process.
    shared_secret: bytes | None = field(default=None, repr=False)
    #: Whether TF_CONFIG has put this process into a cluster without a job.
    by_hand: bool = False
    #: Whether the process scores checkpoints: the models of its strategies are its own, and aren't trained.
    evaluates: bool = False
    #: Whether the callbacks' event under way may have been heard before, by a process that was lost.
    repeats_event: bool = False

    def __post_init__(self) -> None:
        if not _are_shards(self.shards, self.num_shards):
            raise InputError(
                "shards must be distinct and in [0, num_shards), with num_shards at least 1. Received: "
                f"shards={self.shards}, num_shards={self.num_shards}. Outside a job leave both out"
            )

    def for_strategy(self) -> Context:
        """Return the context of a strategy in this process. In an evaluator that is one replica over
        everything, without a job: it takes no part in the exchange."""
        if self.role != "evaluator":
            return self
        alone = Context(self.paths, cache=self.cache, node=self.node, seed=self.seed)
        return replace(alone, stall_timeout=self.stall_timeout, evaluates=True)

    def split_over(self, replicas: int) -> Context:
        """Return this context with each shard split into `replicas` of its own, numbered one after the
        other."""
        if replicas == 1:
            return self
        split = replace(self, num_shards=self.num_shards * replicas, replicas_per_shard=replicas)
        return replace(split, shards=split.replicas_of(self.shards))

    def replicas_of(self, shards: tuple[int, ...]) -> tuple[int, ...]:
        """Return the replicas that shards of the job are split into."""
        count = self.replicas_per_shard
        return tuple(shard * count + index for shard in shards for index in range(count))

    @property
    def shards_of_job(self) -> tuple[int, ...]:
        """This task's shards as the job counts them."""
        return tuple(dict.fromkeys(shard // self.replicas_per_shard for shard in self.shards))

    @property
    def role(self) -> str:
        return self.task.role

    @property
    def index(self) -> int:
        return self.task.index

    @property
    def is_chief(self) -> bool:
        """The chief task, or worker 0 where there is none, as TensorFlow has it."""
        return self.role == "chief" or (self.role == "worker" and self.index == 0 and not self.has_chief)

    @property
    def job(self) -> JobPaths | None:
        return self.paths.job(self.job_id) if self.job_id else None

    @property
    def checkpoint_dir(self) -> Path | None:
        return self.job.checkpoints if self.job else None

    @property
    def memory_checkpoint_dir(self) -> Path | None:
        """The folder in the host's memory for this task's checkpoints, or None."""
        return self.job.memory_of(self.task) if self.job and self.memory_checkpoint else None

    def secret(self) -> bytes | None:
        """Return the secret that peers prove to each other: the job's, or outside a job the shared one. None:
        a secret that only this process knows. Raises InputError for several processes without one."""
        if self.job:
            return self.job.secret.read_bytes()
        if self.shared_secret is None and len(self.workers) > 1:
            return find_secret(os.environ, self.paths, self.workers)
        return self.shared_secret

    def signing_secret(self) -> bytes | None:
        """Return the secret that the job signs with what it reads back later; it stays the same where the job
        goes on on another machine. Outside a job, and else, as `secret`."""
        if self.job and self.job.signing_secret.exists():
            return self.job.signing_secret.read_bytes()
        return self.secret()


def _are_shards(shards: tuple[int, ...], num_shards: int) -> bool:
    """Return whether a task can have `shards` out of `num_shards`."""
    return num_shards >= 1 and len(set(shards)) == len(shards) and all(0 <= s < num_shards for s in shards)


def format_shards(shards: tuple[int, ...], num_shards: int) -> str:
    """Return the value of INSITU_SHARDS: `0,1/4` is shards 0 and 1 out of 4; `/4` is none of them."""
    return f"{','.join(map(str, shards))}/{num_shards}"


def parse_shards(text: str) -> tuple[tuple[int, ...], int]:
    """Return (shards, number of shards) of a value of INSITU_SHARDS. Raises InputError."""
    listed, slash, total = text.partition("/")
    try:
        shards, num_shards = tuple(int(s) for s in listed.split(",") if s), int(total)
    except ValueError:
        slash = ""
    if not slash or not _are_shards(shards, num_shards):
        raise InputError(
            f"{SHARDS_ENV} lists distinct shards in [0, N), then '/' and N, such as 0,1/4. Received: {text!r}"
        )
    return shards, num_shards


def read_context(environ: Mapping[str, str]) -> Context:
    """Return the context that `environ` describes. Raises InputError where a value is not of its form."""
    paths = Paths(
        Path(environ[HOME_ENV]).expanduser().absolute() if environ.get(HOME_ENV) else default_home()
    )
    try:
        tf_config = json.loads(environ.get(TF_CONFIG_ENV) or "{}")
        cluster = tf_config.get("cluster", {})
    except (ValueError, AttributeError) as error:
        raise InputError(
            f"{TF_CONFIG_ENV} must be a JSON object. Received: {environ[TF_CONFIG_ENV]!r}"
        ) from error
    shards, num_shards = parse_shards(environ.get(SHARDS_ENV) or "0/1")
    found = Context(
        paths=paths,
        job_id=environ.get(JOB_ID_ENV) or None,
        task=TaskId.parse(environ.get(TASK_ENV) or "worker:0"),
        cache=environ.get(CACHE_ENV) or None,
        shards=shards,
        num_shards=num_shards,
        node=NodeId(environ[NODE_ENV]) if environ.get(NODE_ENV) else None,
        workers=tuple(cluster.get("worker", ())),
        servers=tuple(cluster.get("ps", ())),
        server_backups=int(environ.get(PS_BACKUPS_ENV) or 0),
        has_chief="chief" in cluster,
        seed=int(environ.get(SEED_ENV) or 0),
        incarnation=int(environ.get(ATTEMPT_ENV) or 1),
        stall_timeout=float(environ.get(STALL_TIMEOUT_ENV) or 600.0),
        generation=int(environ.get(GENERATION_ENV) or 0),
        memory_checkpoint=bool(environ.get(MEMORY_CHECKPOINT_ENV)),
        refresh=int(environ.get(REFRESH_ENV) or 0),
    )
    if found.job_id is not None or environ.get(TASK_ENV):
        return found
    return _join_by_hand(found, read_cluster(tf_config), has_shards=bool(environ.get(SHARDS_ENV)))


def _join_by_hand(context: Context, cluster: HandMadeCluster | None, *, has_shards: bool) -> Context:
    """Return the context of a process that TF_CONFIG has put into a cluster: each worker has a shard."""
    if cluster is None:
        return context
    here = replace(
        context, task=cluster.task, workers=cluster.workers, has_chief=False, by_hand=cluster.size > 1
    )
    if has_shards or cluster.task.role != "worker":
        return here
    return replace(here, shards=(cluster.task.index,), num_shards=len(cluster.workers))


_repeating: list[bool] = []
"""Not empty while callbacks are called again."""


@contextlib.contextmanager
def repeating_events() -> Iterator[None]:
    """While open, `context()` tells that the event of callbacks under way may have been heard before."""
    _repeating.append(True)
    try:
        yield
    finally:
        _repeating.pop()


def context() -> Context:
    """Return the context of this process, read afresh from its environment.

    `repeats_event` is true while a callback is called again for an event that a lost process may have
    handled, wholly or in part: a callback that sends mails or counts calls elsewhere can skip it.
    """
    found = read_context(os.environ)
    return replace(found, repeats_event=True) if _repeating else found
