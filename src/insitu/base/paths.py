"""Every name under $INSITU_HOME. No other module joins a path there.

    $INSITU_HOME/
      catalog.sqlite                    caches, versions, owners; written by `insitu import`
      topology.json                     nodes that `insitu up` brought up
      keys/USER                         signs what this user reads back; see `signatures.py`
      head.json  head.lock  head.log    the head of a cluster of hosts whose home this is; see cluster/wire
      members.json                      the agents that it has seen
      token  cluster-secret             what agents, head and commands, and clusters by hand, prove; mode 0600
      ui-USER.json  ui-USER-audit.log   the address of a user's page, and its tokens; what was changed there
      locks/CACHE.lock                  held by the one process that imports into a cache
      staging/CACHE~TOKEN/              half-written versions; removed when their import has died
        stores/NODE/  prepared          becomes vVERSION/ of a node's store; for an agent: which that was
      staging/~TOKEN/                   files that another machine has sent for a command; what is removed
      exports/EXPORT.json               how far an export that isn't complete has come
      nodes/NODE/store-id               identifies this store, wherever its disk is
      nodes/NODE/store.json             its quota; see grid/store_settings.py
      nodes/NODE/agent.json             who serves it and holds agent.lock; agent.pem; agent-NODE.log
      metadata.sqlite  files.sqlite     what a head alone knows; names of insitu:// in a home without agents
      metadata.json  fence.json         which etcd holds it instead, mode 0600; the head's right to change it
      etcd/                             a member of an etcd that insitu runs; see cluster/failover
      catalog-pending                   the change of the catalogue of which etcd may know more
      nodes/NODE/~files/blocks/VOLUME/KEY   blocks of files that memory has no room for; names.sqlite: of old
      nodes/NODE/CACHE/vVERSION/        the store of one node
        part-00000.arrow                of earlier versions perhaps a link, see grid/repair.py
        part-00000.partial  .fetched    what has arrived of a copy; marks one that was fetched for jobs
        manifest.json                   what this store holds of the version; see grid/manifests.py
        part-00000.verified             the file's stat when its checksum was right; see grid/verification.py
      jobs/JOB/                         one job; made by `insitu start`, then owned by its controller
        job.json  secret  code/         what to run; `secret` is readable by its owner alone
        environment.json                the variables that its tasks find, but for secrets; mode 0600
        roster.json  placement.json     who trains with whom now; tasks, nodes, shards and cache as they were
        journal.sqlite  controller.json controller.log
        engine-NODE.lock                on another host: held by what runs tasks there; see cluster/job_hosts
        term.json  lease.json  signing-secret  of a job on hosts; see cluster/leases
        paused                          of a job that resumes by itself once it has its places again
        heartbeat  requests.sock  output.log    the supervisor's last sign; the controller's; merged output
        shards/CACHE.json               the pinned shard map of each cache that the job has opened
        tasks/ROLE-INDEX/               one task
          attempt-1.log  progress  reads.json  failure.json
          files/                        of workers beside the chief, see written_once.py; code.written: of it
          samples.jsonl                 what the task has done, measured while it trains
          fits.json  callbacks/         of workers with servers: fits that ended; what callbacks remember
          loop-epochs.jsonl             of worker 0: how far custom loops have come; servers.json: of servers
        checkpoints/                    of the chief; fit-N.elsewhere: their place; servers/: of servers
        evaluations.jsonl               what the evaluator has found, by checkpoint; trainings.jsonl: of whom
        copies.jsonl                    of jobs on hosts: when partitions were brought to those that read them
        export/NAME/  summaries/ROLE-INDEX/   published models; event files for TensorBoard
        ledger/                         rows that have entered the model, by epochs and shard
      unpublished/JOB/ROLE-INDEX/       writes of a task to insitu:// while the head was unreachable
      job-copies/JOB/                   from which another machine resumes, if the job's is lost
        code.tar                        JOB_DIR, packed; beside JOB/, JOB.term has the highest term seen here

Two things are elsewhere. A host keeps checkpoints in memory in /dev/shm/insitu-JOB-HASH/ROLE-INDEX/, and
blocks of files in /dev/shm/insitu-files-HASH/VOLUME/KEY; the hash is that of the job's or the store's folder.

A cache's name becomes one folder's name by writing `@` for `/`, which no cache's name contains.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from insitu.base.spec import NO_CACHE, TaskId, check_cache_name, check_simple_name

HOME_ENV = "INSITU_HOME"
MEMORY = Path("/dev/shm")
"""The file system that Linux keeps in memory alone."""
MANIFEST, EVENT_FILE = "manifest.json", "events.out.tfevents."  # TensorBoard's names begin so


def default_home() -> Path:
    """Return $INSITU_HOME, or ~/.insitu, absolute."""
    return Path(os.environ.get(HOME_ENV) or "~/.insitu").expanduser().absolute()


def cache_folder_name(cache: str) -> str:
    return check_cache_name(cache).replace("/", "@")


def cache_name_of_folder(folder: str) -> str:
    return folder.partition("~")[0].replace("@", "/")


def partition_file_name(index: int) -> str:
    return f"part-{index:05d}.arrow"


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
        return self.home / "catalog.sqlite-journal"

    @property
    def catalog_pending(self) -> Path:
        return self.home / "catalog-pending"

    @property
    def topology(self) -> Path:
        return self.home / "topology.json"

    @property
    def cluster_secret(self) -> Path:
        return self.home / "cluster-secret"

    def ui(self, user: int) -> Path:
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
        return StagedPaths(self.staging / f"{cache_folder_name(cache)}~{token}")

    def export_journal(self, token: str) -> Path:
        return self.home / "exports" / f"{token}.json"

    def trash(self, token: str) -> Path:
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

    def agent_certificate(self, node: str) -> Path:
        return self.node(node) / "agent.pem"

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

    def partial(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.partition(node, cache, version, index).with_suffix(".partial")

    def fetched(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.partition(node, cache, version, index).with_suffix(".fetched")

    def verified(self, node: str, cache: str, version: int, index: int) -> Path:
        return self.partition(node, cache, version, index).with_suffix(".verified")

    @property
    def local_files(self) -> Path:
        return self.home / "files.sqlite"

    @property
    def metadata(self) -> Path:
        return self.home / "metadata.sqlite"

    @property
    def metadata_settings(self) -> Path:
        return self.home / "metadata.json"

    @property
    def fence(self) -> Path:
        return self.home / "fence.json"

    @property
    def etcd(self) -> Path:
        return self.home / "etcd"

    def etcd_file(self, name: str) -> Path:
        return self.etcd / name

    def files(self, node: str) -> Path:
        return self.node(node) / "~files"

    def old_file_names(self, node: str) -> Path:
        return self.files(node) / "names.sqlite"

    def file_blocks(self, node: str) -> Path:
        return self.files(node) / "blocks"

    def file_memory(self, node: str) -> Path:
        digest = hashlib.sha256(str(self.node(node)).encode()).hexdigest()[:16]
        return MEMORY / f"insitu-files-{digest}"

    @property
    def jobs(self) -> Path:
        return self.home / "jobs"

    def unpublished(self, job_id: str, task: TaskId) -> Path:
        return self.home / "unpublished" / self.job(job_id).root.name / f"{task.role}-{task.index}"

    @property
    def tracked_runs(self) -> Path:
        return self.home / "runs"

    @property
    def job_copies(self) -> Path:
        return self.home / "job-copies"

    def job_copy(self, job_id: str) -> JobPaths:
        return JobPaths(self.job_copies / self.job(job_id).root.name)

    def job_term(self, job_id: str) -> Path:
        return self.job_copies / f"{self.job(job_id).root.name}.term"

    def job(self, job_id: str) -> JobPaths:
        return JobPaths(self.jobs / check_simple_name("A job's id", job_id))


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
        return self.root / "journal"

    @property
    def prepared(self) -> Path:
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
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def requests(self) -> Path:
        return self.root / "requests.sock"

    @property
    def secret(self) -> Path:
        return self.root / "secret"

    @property
    def signing_secret(self) -> Path:
        return self.root / "signing-secret"

    @property
    def term(self) -> Path:
        return self.root / "term.json"

    @property
    def lease(self) -> Path:
        return self.root / "lease.json"

    @property
    def paused(self) -> Path:
        return self.root / "paused"

    @property
    def code_archive(self) -> Path:
        return self.root / "code.tar"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def written_files(self) -> Path:
        return self.root / "code.written"

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def controller(self) -> Path:
        return self.root / "controller.json"

    def engine_lock(self, node: str) -> Path:
        name = check_simple_name("A node's name", node)
        return self.root / f"engine-{name}.lock"

    @property
    def controller_log(self) -> Path:
        return self.root / "controller.log"

    @property
    def output(self) -> Path:
        return self.root / "output.log"

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat"

    @property
    def shard_maps(self) -> Path:
        return self.root / "shards"

    def shard_map(self, cache: str) -> Path:
        name = cache if cache == NO_CACHE else cache_folder_name(cache)
        return self.shard_maps / f"{name}.json"

    def wanted_shards(self, cache: str) -> Path:
        return self.shard_map(cache).with_suffix(".wanted")

    def refused_shards(self, cache: str) -> Path:
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
        return self.root / "predictions" / f"{cache_folder_name(cache)}-{number:05d}"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def saved_elsewhere(self, fit: int) -> Path:
        return self.checkpoints / f"fit-{fit:05d}.elsewhere"

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

    def epoch_ledger(self, epoch: int, shard: int, last: int | None = None) -> Path:
        epochs = f"{epoch:05d}" if last is None else f"{epoch:05d}-{last:05d}"
        return self.ledger / f"epoch-{epochs}.shard-{shard:05d}.json"

    @property
    def tasks(self) -> Path:
        return self.root / "tasks"

    def task(self, task: TaskId) -> Path:
        return self.tasks / f"{task.role}-{task.index}"

    def task_log(self, task: TaskId, incarnation: int) -> Path:
        return self.task(task) / f"attempt-{incarnation}.log"

    def own_files(self, task: TaskId) -> Path:
        return self.task(task) / "files"

    def progress(self, task: TaskId) -> Path:
        return self.task(task) / "progress"

    def samples(self, task: TaskId) -> Path:
        return self.task(task) / "samples.jsonl"

    def reads(self, task: TaskId) -> Path:
        return self.task(task) / "reads.json"

    @property
    def memory(self) -> Path:
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

    def callbacks(self, task: TaskId) -> Path:
        return self.task(task) / "callbacks"

    @property
    def tracking(self) -> Path:
        return self.root / "tracking"

    @property
    def loop_epochs(self) -> Path:
        return self.task(TaskId("worker", 0)) / "loop-epochs.jsonl"

    def strategy(self, task: TaskId) -> Path:
        return self.task(task) / "strategy.json"

    def failure(self, task: TaskId) -> Path:
        return self.task(task) / "failure.json"
