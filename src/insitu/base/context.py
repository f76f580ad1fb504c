"""Reads a task's environment. Outside a job the same script is one replica over everything."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.paths import HOME_ENV, JobPaths, Paths, default_home
from insitu.base.spec import ROLES, NodeId, TaskId

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
ON_LOSS_ENV = "INSITU_ON_LOSS"
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
        *(GENERATION_ENV, STALL_TIMEOUT_ENV, MEMORY_CHECKPOINT_ENV, TF_CONFIG_ENV, REFRESH_ENV, ON_LOSS_ENV),
    }
)
"""Variables that a script finds in its environment; they are read by nothing else, and not before it runs."""

_FIRST_WORKER = TaskId("worker", 0)


@dataclass(frozen=True, slots=True)
class Context:
    """The identity of this process, read from its environment.

    Example:
        >>> me = insitu.context()
        >>> me.task.role, me.task.index, me.num_shards, me.job_id
        ('worker', 0, 1, None)
    """

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
    #: The job's answer to the loss of a task, as `--on-loss` has it; "" outside a job.
    on_loss: str = ""
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
    #: Whether the callbacks may have received the current event before, in a process that has ended.
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
        """The chief task, or worker 0 if there is none, as TensorFlow has it."""
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
        """Return the secret that the job signs with what it reads back later; it stays the same if the job
        resumes on another machine. Outside a job, and else, as `secret`."""
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
    """Return the context that `environ` describes. Raises InputError if a value is not of its form."""
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
        on_loss=environ.get(ON_LOSS_ENV) or "",
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
    """While open, `context()` says that the callbacks may have received the current event before."""
    _repeating.append(True)
    try:
        yield
    finally:
        _repeating.pop()


def context() -> Context:
    """Return the context of this process, read afresh from its environment.

    `repeats_event` is true while a callback is called again for an event that a lost process may have
    handled, wholly or in part: a callback that sends mails or counts calls elsewhere can skip it.

    Example:
        >>> str(insitu.context().task)
        'worker:0'
    """
    found = read_context(os.environ)
    return replace(found, repeats_event=True) if _repeating else found


# Reads a cluster that the user has made by hand: processes that find each other by TF_CONFIG, without
# `insitu start`.
#
# Each process has the same `cluster` and its own `task` in TF_CONFIG, as tf.distribute's workers have. All
# of them train together. There is no controller: if one is lost, the others end with an error


SECRET_ENV = "INSITU_SECRET"
SECRET_FILE_ENV = "INSITU_SECRET_FILE"
MIN_SECRET_BYTES = 16
"""Bytes that a user's secret must have."""
_MADE_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class HandMadeCluster:
    """The place of this process in a cluster by TF_CONFIG."""

    #: Role and number as insitu counts them: a chief is worker 0, and the workers follow it.
    task: TaskId
    #: Addresses of all that train, the chief's first, as `host:port`.
    workers: tuple[str, ...]
    #: Number of tasks of all roles.
    size: int


def read_cluster(tf_config: Mapping[str, Any]) -> HandMadeCluster | None:
    """Return the cluster that a TF_CONFIG describes; None if it has no task or no cluster.

    Raises InputError if it can't be one.
    """
    cluster, own = tf_config.get("cluster"), tf_config.get("task")
    if not cluster or not own:
        return None
    try:
        role, index = str(own["type"]), int(own.get("index", 0))
        addresses = {str(name): tuple(map(str, found)) for name, found in cluster.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            'TF_CONFIG must have the form {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": '
            f'"worker", "index": 0}}}}. Received: {json.dumps(dict(tf_config))}'
        ) from error
    if role not in ROLES:
        raise InputError(f"The task in TF_CONFIG must be one of {', '.join(ROLES)}. Received: {role!r}")
    unknown = sorted(set(addresses) - set(ROLES))
    if unknown:
        raise InputError(
            f"The jobs of a cluster in TF_CONFIG are {', '.join(ROLES)}, as tf.distribute's are. Received: "
            f"{', '.join(unknown)}. Name the tasks that train worker"
        )
    if len(addresses.get("chief", ())) > 1:
        raise InputError(
            "A cluster in TF_CONFIG has one chief. Received: "
            f"{', '.join(addresses['chief'])}. Name the others worker"
        )
    if role != "evaluator" and not 0 <= index < len(addresses.get(role, ())):
        raise InputError(
            f"The task in TF_CONFIG must be in its cluster. Received: {role} {index}, and "
            f"{len(addresses.get(role, ()))} addresses of {role} tasks"
        )
    chief = addresses.get("chief", ())
    if role == "chief":
        role, index = "worker", 0
    elif role == "worker":
        index += len(chief)
    task = TaskId(role, index)  # type: ignore[arg-type]
    workers = (*chief, *addresses.get("worker", ()))
    return HandMadeCluster(task, workers, sum(map(len, addresses.values())))


def find_secret(environ: Mapping[str, str], paths: Paths, workers: tuple[str, ...]) -> bytes:
    """Return the secret that the processes of a cluster prove to each other.

    The user's, out of INSITU_SECRET_FILE or INSITU_SECRET. Without one, processes of one user on one machine
    share a file in $INSITU_HOME, which is made if it isn't there. Raises InputError.
    """
    if given := _read_given(environ):
        return given
    if not all(map(is_loopback, workers)):
        raise InputError(
            "Processes on several hosts need a secret that only they know. Received: a TF_CONFIG with "
            f"workers {', '.join(workers)}, neither {SECRET_FILE_ENV} nor {SECRET_ENV}. Make one, as by "
            "`openssl rand -hex 32 > secret; chmod 600 secret`, copy it to each host, and set "
            f"{SECRET_FILE_ENV}=secret for each process. `insitu start` needs none"
        )
    own = _share_file(paths.cluster_secret)
    return hmac.new(own, json.dumps(workers).encode(), hashlib.sha256).digest()


def _read_given(environ: Mapping[str, str]) -> bytes:
    """Return the user's own secret, or b"" without one."""
    name = SECRET_FILE_ENV if environ.get(SECRET_FILE_ENV) else SECRET_ENV
    value = environ.get(name)
    if not value:
        return b""
    try:
        secret = _read_secret_file(Path(value)) if name == SECRET_FILE_ENV else value.encode()
    except OSError as error:
        raise InputError(f"{name} must name a file that can be read. Received: {value} ({error})") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise InputError(
            f"{name} must give at least {MIN_SECRET_BYTES} bytes. Received: {len(secret)}. Make a secret by "
            "`openssl rand -hex 32`"
        )
    return secret


def _read_secret_file(path: Path) -> bytes:
    """Return the user's secret, out of a file that nobody else may read. Raises InputError, OSError."""
    with path.expanduser().open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
            raise InputError(
                f"Only its owner may read the secret of {SECRET_FILE_ENV}. Received: {path} of user "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}. Give it mode 0600"
            )
        return file.read().strip()


def _share_file(path: Path) -> bytes:
    """Return the content of the user's own secret file, which is made if it isn't there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(os.urandom(_MADE_SECRET_BYTES))
            if not path.exists():
                os.link(staged, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            staged.unlink(missing_ok=True)
        found = path.stat()
        secret = path.read_bytes()
    except OSError as error:
        raise InputError(f"The file {path} must be this user's own. Received: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(secret) < MIN_SECRET_BYTES:
        raise InputError(
            f"The file {path} must be this user's own, readable by nobody else, of {MIN_SECRET_BYTES} "
            f"bytes or more. Received: owner {found.st_uid}, mode {found.st_mode & 0o777:o}, {len(secret)} "
            "bytes. Remove it: the next process makes it again"
        )
    return secret
