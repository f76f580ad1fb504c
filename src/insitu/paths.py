"""Every name under $INSITU_HOME. No other module joins a path there.

    $INSITU_HOME/
      catalog.sqlite                    caches, versions, owners; written by `insitu import`
      topology.json                     nodes that `insitu up` brought up
      keys/USER                         signs what this user reads back; see `signatures.py`
      head.json  head.lock  head.log    the head of a cluster of hosts whose home this is; see cluster/agents
      members.json                      the agents that it has seen
      token                             what agents, head and commands prove to each other; mode 0600
      cluster-secret                    what clusters by hand on this machine prove to each other; mode 0600
      ui-USER.json  ui-USER-audit.log   where the page of a user is, and its tokens; what was changed there
      locks/CACHE.lock                  held by the one process that imports into a cache
      staging/CACHE~TOKEN/              half-written versions; removed when their import has died
        stores/NODE/                    becomes vVERSION/ of that node's store
        prepared                        on the host of an agent: the version that it has become
      exports/EXPORT.json               how far an export that isn't complete has come
      nodes/NODE/store-id               what tells this store from others, wherever its disk is
      nodes/NODE/store.json             its quota and its second path; see grid/store_settings.py
      nodes/NODE/agent.json             the agent of this store, which holds agent.lock; agent-NODE.log is its
      nodes/NODE/~files/                files of insitu:// on this node; see grid/shared_files
        names.sqlite                    what their names stand for
        blocks/VOLUME/KEY               what the memory has no room for
      nodes/NODE/CACHE/vVERSION/        the store of one node
        part-00000.arrow                a link if the partition lies on the second path
        last-read                       changed whenever a dataset opens the version here
        part-00000.partial              what has arrived of a copy from another node
        part-00000.fetched              marks a copy that was fetched for jobs, and that no owner has
        manifest.json                   what this store holds of the version; see grid/manifests.py
        part-00000.verified             the file's stat when its checksum was right; see grid/verification.py
      jobs/JOB/                         one job; made by `insitu start`, then owned by its controller
        job.json  secret  code/         what to run; `secret` is readable by its owner alone
        roster.json                     who trains with whom now; replaced by each new generation
        placement.json                  tasks, nodes and shards, and the cache as it was then
        journal.sqlite  controller.json controller.log
        engine-NODE.lock                on another host: held by what runs the tasks there, see cluster/agents
        term.json  signing-secret       of a job that was brought to another machine; see cluster/agents
        requests.sock                   where the controller takes requests to stop or scale the job
        output.log                      all tasks' output, merged, each line with its task
        shards/CACHE.json               the pinned shard map of each cache that the job has opened
        tasks/ROLE-INDEX/               one task
          attempt-1.log  progress  reads.json  failure.json
          samples.jsonl                 what the task has done, measured while it trains
          fits.json                     of workers with servers: the fits that ended
          loop-epochs.jsonl             of worker 0: how far custom loops have come in their data
          servers.json                  of parameter servers: what they hold and have done
        checkpoints/                    written by the chief; servers/ by parameter servers
        evaluations.jsonl               what the evaluator has found, by checkpoint; trainings.jsonl: of whom
        copies.jsonl                    of jobs on hosts: when partitions were brought to those that read them
        export/NAME/                    models that an exporter has published
        summaries/ROLE-INDEX/           event files for TensorBoard
        ledger/                         rows that have entered the model, by epoch and shard
      job-copies/JOB/                   what another machine goes on from, if that of the job is lost
        code.tar                        JOB_DIR, packed; beside JOB/, JOB.term has the highest term seen here

Three things lie elsewhere. A host keeps checkpoints in memory in /dev/shm/insitu-JOB-HASH/ROLE-INDEX/, and
blocks of files in /dev/shm/insitu-files-HASH/VOLUME/KEY; the hash is that of the job's or the store's folder.
The second path of a store has partitions in insitu-STORE_ID/CACHE/vVERSION/part-00000.arrow.

A cache's name becomes one folder's name by writing `@` for `/`, which no cache's name contains.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from insitu.spec import NO_CACHE, TaskId, check_cache_name, check_simple_name

HOME_ENV = "INSITU_HOME"
MEMORY = Path("/dev/shm")
"""The file system that Linux keeps in memory alone."""
MANIFEST = "manifest.json"


def default_home() -> Path:
    """Return $INSITU_HOME, or ~/.insitu, absolute."""
    return Path(os.environ.get(HOME_ENV) or "~/.insitu").expanduser().absolute()


def cache_folder_name(cache: str) -> str:
    return check_cache_name(cache).replace("/", "@")


def cache_name_of_folder(folder: str) -> str:
    """Return the cache that `folder`, in a store or in staging, belongs to."""
    return folder.partition("~")[0].replace("@", "/")


def partition_file_name(index: int) -> str:
    return f"part-{index:05d}.arrow"


def is_missing(path: Path) -> bool:
    """Return True where nothing has this name. What can't be looked at for another reason isn't missing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True, slots=True)
class Paths:
    """Names below one $INSITU_HOME. Nothing here touches the disk."""

    home: Path

    @classmethod
    def default(cls) -> Paths:
        return cls(default_home())

    @property
    def catalog(self) -> Path:
        return self.home / "catalog.sqlite"

    @property
    def catalog_journal(self) -> Path:
        """Return the file in which SQLite keeps what a change of the catalogue would undo."""
        return self.home / "catalog.sqlite-journal"

    @property
    def topology(self) -> Path:
        return self.home / "topology.json"

    @property
    def cluster_secret(self) -> Path:
        return self.home / "cluster-secret"

    def ui(self, user: int) -> Path:
        """Return the file that says where the page of a user runs, and its tokens."""
        return self.home / f"ui-{user}.json"

    def ui_audit(self, user: int) -> Path:
        return self.home / f"ui-{user}-audit.log"

    @property
    def token(self) -> Path:
        return self.home / "token"

    @property
    def head(self) -> Path:
        return self.home / "head.json"

    @property
    def head_lock(self) -> Path:
        return self.home / "head.lock"

    @property
    def head_log(self) -> Path:
        return self.home / "head.log"

    @property
    def members(self) -> Path:
        return self.home / "members.json"

    @property
    def staging(self) -> Path:
        return self.home / "staging"

    def staged(self, cache: str, token: str) -> StagedPaths:
        """Return where one import puts its half-written version of `cache`; no cache's name contains `~`."""
        return StagedPaths(self.staging / f"{cache_folder_name(cache)}~{token}")

    def export_journal(self, token: str) -> Path:
        """Return the file that says how far an export has come."""
        return self.home / "exports" / f"{token}.json"

    def trash(self, token: str) -> Path:
        """Return a folder that belongs to no cache any more, about to be deleted."""
        return self.staging / f"~{token}"

    @property
    def locks(self) -> Path:
        return self.home / "locks"

    def cache_lock(self, cache: str) -> Path:
        return self.locks / f"{cache_folder_name(cache)}.lock"

    @property
    def keys(self) -> Path:
        return self.home / "keys"

    def key(self, user: int) -> Path:
        """Return the file with the key of a user, given by number."""
        return self.keys / str(user)

    @property
    def nodes(self) -> Path:
        return self.home / "nodes"

    def node(self, node: str) -> Path:
        return self.nodes / check_simple_name("A node's name", node)

    def store_id(self, node: str) -> Path:
        return self.node(node) / "store-id"

    def store_settings(self, node: str) -> Path:
        return self.node(node) / "store.json"

    def agent(self, node: str) -> Path:
        return self.node(node) / "agent.json"

    def agent_lock(self, node: str) -> Path:
        return self.node(node) / "agent.lock"

    def agent_log(self, node: str) -> Path:
        return self.home / f"agent-{self.node(node).name}.log"

    def cache_store(self, node: str, cache: str) -> Path:
        return self.node(node) / cache_folder_name(cache)

    def version(self, node: str, cache: str, version: int) -> Path:
        return self.cache_store(node, cache) / f"v{version}"

    def partition(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.version(node, cache, version) / partition_file_name(index)

    def manifest(self, node: str, cache: str, version: int) -> Path:
        return self.version(node, cache, version) / MANIFEST

    def last_read(self, node: str, cache: str, version: int) -> Path:
        """Return the empty file whose time of change says when a dataset last opened the version there."""
        return self.version(node, cache, version) / "last-read"

    def partial(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.partition(node, cache, version, index).with_suffix(".partial")

    def fetched(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.partition(node, cache, version, index).with_suffix(".fetched")

    def verified(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.partition(node, cache, version, index).with_suffix(".verified")

    def files(self, node: str) -> Path:
        """Return the folder of files of `insitu://`; no cache's name contains `~`."""
        return self.node(node) / "~files"

    def file_names(self, node: str) -> Path:
        return self.files(node) / "names.sqlite"

    def file_blocks(self, node: str) -> Path:
        return self.files(node) / "blocks"

    def file_memory(self, node: str) -> Path:
        """Return the folder in the host's memory that belongs to the files of a store."""
        digest = hashlib.sha256(str(self.node(node)).encode()).hexdigest()[:16]
        return MEMORY / f"insitu-files-{digest}"

    @property
    def jobs(self) -> Path:
        return self.home / "jobs"

    @property
    def job_copies(self) -> Path:
        return self.home / "job-copies"

    def job_copy(self, job_id: str) -> JobPaths:
        """Return the copy of a job of another machine, which is laid out as a job."""
        return JobPaths(self.job_copies / self.job(job_id).root.name)

    def job_term(self, job_id: str) -> Path:
        """Return the file with the highest term of a job that a server of this host has seen."""
        return self.job_copies / f"{self.job(job_id).root.name}.term"

    def job(self, job_id: str) -> JobPaths:
        return JobPaths(self.jobs / check_simple_name("A job's id", job_id))


@dataclass(frozen=True, slots=True)
class TierPaths:
    """Names below the folder that a store has on its second path. It is laid out as the store is."""

    root: Path

    def cache_store(self, cache: str) -> Path:
        return self.root / cache_folder_name(cache)

    def version(self, cache: str, version: int) -> Path:
        return self.cache_store(cache) / f"v{version}"

    def partition(self, cache: str, version: int, index: int) -> Path:
        return self.version(cache, version) / partition_file_name(index)


def tier_folder(path: Path, store_id: str) -> Path:
    """Return the folder on a second path that belongs to a store."""
    return path / f"insitu-{store_id}"


@dataclass(frozen=True, slots=True)
class StagedPaths:
    """Names below one import's folder in staging."""

    root: Path

    def store(self, node: str) -> Path:
        return self.root / "stores" / check_simple_name("A node's name", node)

    def partition(self, node: str, index: int) -> Path:
        return self.store(node) / partition_file_name(index)

    def manifest(self, node: str) -> Path:
        return self.store(node) / MANIFEST

    @property
    def journal(self) -> Path:
        """Says how far the import is, if it can be continued."""
        return self.root / "journal"

    @property
    def prepared(self) -> Path:
        """Says which version of an agent's store the staged partitions have become."""
        return self.root / "prepared"


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Names below one job's folder."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "job.json"

    @property
    def placement(self) -> Path:
        return self.root / "placement.json"

    @property
    def roster(self) -> Path:
        return self.root / "roster.json"

    @property
    def requests(self) -> Path:
        return self.root / "requests.sock"

    @property
    def secret(self) -> Path:
        return self.root / "secret"

    @property
    def signing_secret(self) -> Path:
        """Return the secret that a job signs with, where it has another one than its tasks."""
        return self.root / "signing-secret"

    @property
    def term(self) -> Path:
        return self.root / "term.json"

    @property
    def code_archive(self) -> Path:
        return self.root / "code.tar"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def controller(self) -> Path:
        return self.root / "controller.json"

    def engine_lock(self, node: str) -> Path:
        """Return the file that the process holds which runs the job's tasks of a node, on its host."""
        name = check_simple_name("A node's name", node)
        return self.root / f"engine-{name}.lock"

    @property
    def controller_log(self) -> Path:
        return self.root / "controller.log"

    @property
    def output(self) -> Path:
        return self.root / "output.log"

    @property
    def shard_maps(self) -> Path:
        return self.root / "shards"

    def shard_map(self, cache: str) -> Path:
        name = cache if cache == NO_CACHE else cache_folder_name(cache)
        return self.shard_maps / f"{name}.json"

    def wanted_shards(self, cache: str) -> Path:
        """Return the file by which a task on another host asks for the shards of a cache."""
        return self.shard_map(cache).with_suffix(".wanted")

    def refused_shards(self, cache: str) -> Path:
        """Return the file that says why there won't be any."""
        return self.shard_map(cache).with_suffix(".refused")

    @property
    def refreshes(self) -> Path:
        return self.root / "refreshes"

    def refresh(self, epoch: int, *, wanted: bool = False) -> Path:
        """Return the file that says which rows are read from `epoch` on; `wanted`: one that asks for it."""
        return self.refreshes / f"epoch-{epoch:05d}.{'wanted' if wanted else 'json'}"

    @property
    def refresh_lock(self) -> Path:
        return self.refreshes / "lock"

    def predictions(self, cache: str, number: int) -> Path:
        """Return the folder of the parts of predictions that a call, counted from 0, makes a cache of."""
        return self.root / "predictions" / f"{cache_folder_name(cache)}-{number:05d}"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def trainings(self) -> Path:
        return self.root / "trainings.jsonl"

    @property
    def copies(self) -> Path:
        return self.root / "copies.jsonl"

    @property
    def all_summaries(self) -> Path:
        return self.root / "summaries"

    def summaries(self, task: TaskId) -> Path:
        return self.all_summaries / f"{task.role}-{task.index}"

    @property
    def exports(self) -> Path:
        return self.root / "export"

    @property
    def statistics(self) -> Path:
        return self.root / "statistics"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    def epoch_ledger(self, epoch: int, shard: int) -> Path:
        return self.ledger / f"epoch-{epoch:05d}.shard-{shard:05d}.json"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks"

    def task(self, task: TaskId) -> Path:
        return self.tasks / f"{task.role}-{task.index}"

    def task_log(self, task: TaskId, incarnation: int) -> Path:
        return self.task(task) / f"attempt-{incarnation}.log"

    def progress(self, task: TaskId) -> Path:
        return self.task(task) / "progress"

    def samples(self, task: TaskId) -> Path:
        return self.task(task) / "samples.jsonl"

    def reads(self, task: TaskId) -> Path:
        return self.task(task) / "reads.json"

    @property
    def memory(self) -> Path:
        """A folder in the host's memory, which outlives tasks and goes with the job."""
        return MEMORY / f"insitu-{self.root.name}-{zlib.crc32(str(self.root).encode()):08x}"

    def memory_of(self, task: TaskId) -> Path:
        return self.memory / f"{task.role}-{task.index}"

    @property
    def server_checkpoints(self) -> Path:
        return self.checkpoints / "servers"

    def server_account(self, task: TaskId) -> Path:
        return self.task(task) / "servers.json"

    def fits(self, task: TaskId) -> Path:
        return self.task(task) / "fits.json"

    @property
    def loop_epochs(self) -> Path:
        return self.task(TaskId("worker", 0)) / "loop-epochs.jsonl"

    def strategy(self, task: TaskId) -> Path:
        return self.task(task) / "strategy.json"

    def failure(self, task: TaskId) -> Path:
        return self.task(task) / "failure.json"
