"""Makes a job: checks the request, places the tasks, writes the job's folder, starts its supervisor.

Until the folder is renamed into place nothing of the job is visible, and whatever fails before leaves
nothing behind. A folder whose maker was killed is removed by the next `start`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from insitu.access import make_sticky_folder
from insitu.cluster.agents import HOSTS_ENGINE, read_versions
from insitu.cluster.client.host_nodes import (
    HostNodes,
    check_cores,
    check_gpus,
    check_memory,
    check_reach,
    choose_host_threads,
    choose_nodes,
    find_host_nodes,
    prefer_live_owners,
)
from insitu.cluster.client.job_code import copy_code
from insitu.cluster.client.kept_environment import choose_variables, compose_environment
from insitu.cluster.client.roles import assign_roles, imports_insitu
from insitu.cluster.client.start_conditions import read_keras_settings
from insitu.cluster.control import clean_up, staged_folder
from insitu.cluster.decide import (
    choose_thread_count,
    choose_worker_count,
    find_shard_holders,
    new_job,
    place_tasks,
    stand_in_for_cache,
)
from insitu.cluster.engines import count_free_gpus
from insitu.cluster.job_files import JobEnvironment, Journal, read_environment, take_lock, write_environment
from insitu.cluster.task import resolve_command
from insitu.config import DeviceSettings, read_settings
from insitu.context import ALLOW_MIXED_ENV
from insitu.durable import sync_folder, sync_tree
from insitu.errors import ClusterError, JobSpecError, StorageFull
from insitu.grid import Catalog, check_here, load_topology
from insitu.paths import HOME_ENV, JobPaths, Paths
from insitu.processes import read_available_bytes, read_host
from insitu.spec import (
    NO_CACHE,
    CacheSpec,
    JobSpec,
    NodeId,
    Placement,
    Topology,
    check_simple_name,
)
from insitu.unauthenticated import ALLOW_UNAUTHENTICATED_ENV

SECRET_BYTES = 32
_supervisors: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process has started and not reaped yet."""
_FILES_OF_IGNITE = (
    *("INSITU_IGNITE_CREDENTIALS", "INSITU_IGNITE_CA", "INSITU_IGNITE_CERT", "INSITU_IGNITE_KEY"),
    *("IGNITE_DATASET_CERTFILE", "IGNITE_DATASET_KEYFILE"),
)
"""Variables with files that a job with --refresh reads while it runs."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `insitu start` was given. None stands for a default that depends on the cache and the machine."""

    #: Name of the cache to train on; NO_CACHE for a script that brings its own data.
    cache: str
    #: Folder or .zip that holds the script.
    job_dir: Path
    #: JOB_CMD and its arguments.
    command: tuple[str, ...]
    #: Names of the nodes that tasks run on; empty: all.
    nodes: tuple[str, ...] = ()
    #: Number of workers; None: the number of nodes that own data, without a cache of all nodes.
    workers: int | None = None
    #: Number of shards; None: as many as workers.
    shards: int | None = None
    #: Number of ps tasks; None: one on each node, since large tables want the memory of all.
    ps: int | None = 0
    #: Other ps tasks that mirror each one.
    ps_backups: int = 0
    #: Whether there is a chief task beside the workers.
    chief: bool = False
    #: Whether there is an evaluator task.
    evaluator: bool = False
    #: Seconds that the evaluator has to end once training is over; None: a default for the script.
    evaluator_grace: float | None = None
    #: What runs the tasks: local or hosts; "": hosts where this home has agents on some.
    engine: str = ""
    #: Beginning of the job's id; None: the last part of the cache's name, without a cache that of the folder.
    name: str | None = None
    #: Failures after which the job isn't tried again.
    max_restarts: int = 3
    #: All randomness follows from it.
    seed: int = 0
    #: Backend threads of each replica; None: the machine's cores divided by the tasks that compute.
    threads: int | None = None
    #: Seconds without progress after which the job has failed.
    stall_timeout: float = 600.0
    #: How tasks set up devices.
    settings: DeviceSettings = field(default_factory=DeviceSettings)
    #: What is done about a lost worker.
    on_loss: Literal["replace", "adopt", "restart"] = "replace"
    #: Whether tasks move where their data has moved while the job runs.
    on_rebalance: Literal["follow", "stay"] = "follow"
    #: Preloaded processes that can take a lost task's place; None: one where memory allows.
    standby: int | None = None
    #: Whether tasks keep checkpoints in memory, too.
    memory_checkpoint: bool = False
    #: After how many epochs rows are read from Ignite again; 0: never.
    refresh: int = 0
    #: Whether tasks that train together may run on hosts whose backends round differently.
    allow_mixed_processors: bool = False
    #: GPUs that each task that trains has for itself; 0: tasks see those that this process sees.
    gpus_per_worker: int = 0
    #: MiB of main memory that each task that trains must find free on its node; 0: any.
    memory_per_worker: int = 0
    #: Processors of its node that each task that trains has for itself, and the default of `threads`; 0: any.
    cores_per_worker: int = 0
    #: Whether libraries without authentication may connect tasks of several hosts.
    allow_unauthenticated: bool = False
    #: What is done about the job after another node has become the head's by itself.
    on_take_over: Literal["wait", "resume"] = "wait"
    #: Names of variables of the shell that are kept with the job, whatever their names say.
    env: tuple[str, ...] = ()

    @property
    def given_threads(self) -> int | None:
        """The backend threads of each replica that an option names; None: none does."""
        return self.threads if self.threads is not None else self.cores_per_worker or None


def submit(paths: Paths, request: Request) -> str:
    """Make the job and start its supervisor, which outlives this process. Returns the job's id.

    Raises InputError or one of its kinds for what can't be used, StorageFull where the disk is full.
    """
    has_cache = request.cache != NO_CACHE
    cache = Catalog(paths).get(request.cache) if has_cache else None
    hosts = find_host_nodes(paths, request.engine, cache)
    topology = load_topology(paths) if hosts is None else hosts.topology
    if request.nodes:
        topology = choose_nodes(topology, request.nodes, cache)
        hosts = None if hosts is None else hosts.restrict_to(topology)
    if request.refresh:
        _check_refresh(request, cache)
    cache = _choose_copies(paths, request, cache, topology, on_hosts=hosts is not None)
    spec = _spec(request, cache, topology, hosts)
    clean_up(paths, request.cache)
    job = paths.job(spec.job_id)
    lock = -1
    try:
        with _staged(paths, spec.job_id) as (staged, lock):
            copy_code(request.job_dir, staged.code, paths.home)
            command = resolve_command(staged.code, spec.command, sys.executable)
            spec = assign_roles(
                spec,
                knows_insitu=imports_insitu(staged.code, command),
                shards=request.shards,
                grace=request.evaluator_grace,
                cores=_count_cores() if request.given_threads is None else None,
            )
            cache = cache or stand_in_for_cache(spec.shards, topology)
            placement = place_tasks(spec, cache, topology)
            spec = _fit_to_hosts(paths, request, spec, placement, hosts)
            everywhere = topology.nodes if hosts is not None and not has_cache else ()
            _write(staged, spec, placement, cache, everywhere, topology, _keep_environment(request))
            sync_tree(staged.root)
            if has_cache:
                Catalog(paths).pin(cache.name, cache.version, spec.job_id)
            staged.root.rename(job.root)
            sync_folder(paths.jobs)
        start_supervisor(job, lock)
    except BaseException as error:
        Catalog(paths).unpin(spec.job_id)
        shutil.rmtree(job.root, ignore_errors=True)
        if isinstance(error, OSError):
            kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else ClusterError
            raise kind(
                f"Can't make the job's folder in {paths.jobs}: {error}. Make room there and allow writing, "
                "or set INSITU_HOME to another folder"
            ) from error
        raise
    finally:
        if lock >= 0:
            os.close(lock)
    return spec.job_id


def _check_refresh(request: Request, cache: CacheSpec | None) -> None:
    """Raise JobSpecError where a job can't read rows again."""
    origin = {} if cache is None or cache.origin is None else dict(cache.origin)
    if "servers" not in origin:
        raise JobSpecError(
            f"--refresh is for jobs on a partitioned cache of Apache Ignite, or on a snapshot of one. "
            f"Received: {request.cache}. Leave it out, or start the job on ignite://HOST/CACHE"
        )
    if request.ps != 0:
        raise JobSpecError(
            "--refresh is for workers that train in step. Received: parameter servers. Give --ps 0, or start "
            "a job for the rows of now"
        )


def _choose_copies(
    paths: Paths, request: Request, cache: CacheSpec | None, topology: Topology, *, on_hosts: bool
) -> CacheSpec | None:
    """Return the cache with the owners that tasks read from first. Raises GridError where tasks run on this
    machine and partitions don't lie here."""
    if cache is None:
        return None
    if not on_hosts:
        check_here(paths, cache, range(len(cache.partitions)))
    return prefer_live_owners(cache, topology) if on_hosts or request.nodes else cache


def _fit_to_hosts(
    paths: Paths, request: Request, spec: JobSpec, placement: Placement, hosts: HostNodes | None
) -> JobSpec:
    """Return the specification with what depends on the hosts that tasks are placed on.

    Raises ClusterError, PlacementError where these can't train together.
    """
    if hosts is None:
        if spec.gpus_per_worker:
            _check_own_gpus(placement, spec.gpus_per_worker)
        if spec.memory_per_worker:
            _check_own_memory(placement, spec.memory_per_worker)
        if spec.cores_per_worker:
            here = NodeId("this machine")
            check_cores(_gather(placement, here), spec.cores_per_worker, {here: _count_cores()})
        return spec
    if spec.gpus_per_worker:
        check_gpus(placement, spec.gpus_per_worker, hosts.gpus)
    if spec.memory_per_worker:
        check_memory(placement, spec.memory_per_worker, hosts.memory)
    if spec.cores_per_worker:
        check_cores(placement, spec.cores_per_worker, hosts.cores)
    check_reach(paths, {task.node for task in placement.tasks})
    if request.given_threads is not None:
        return spec
    return replace(spec, threads=choose_host_threads(placement, hosts.cores))


def _check_own_gpus(placement: Placement, each: int) -> None:
    """Raise PlacementError where this machine, which all nodes are, has too few GPUs that no task has."""
    free, known = count_free_gpus()
    here = NodeId(f"this machine, of whose {known} GPU(s) {known - free} are taken,")
    check_gpus(_gather(placement, here), each, {here: free})


def _check_own_memory(placement: Placement, each: int) -> None:
    """Raise PlacementError where this machine, which all nodes are, has less memory free than tasks need."""
    here = NodeId("this machine")
    check_memory(_gather(placement, here), each, {here: read_available_bytes()})


def _gather(placement: Placement, node: NodeId) -> Placement:
    """Return the placement with all tasks on one node."""
    return replace(placement, tasks=tuple(replace(task, node=node) for task in placement.tasks))


def _spec(request: Request, cache: CacheSpec | None, topology: Topology, hosts: HostNodes | None) -> JobSpec:
    if request.engine not in ("", "local", HOSTS_ENGINE):
        raise JobSpecError(f"--engine must be local or {HOSTS_ENGINE}. Received: {request.engine}")
    beside_data = len(topology.nodes) if cache is None else choose_worker_count(cache, topology)
    workers = beside_data if request.workers is None else request.workers
    if request.workers is None and request.shards is not None:
        workers = min(workers, max(1, request.shards))
    name = request.name or _choose_name(request, cache)
    check_simple_name("A job's name (--name)", name)
    threads = choose_thread_count(_count_cores(), max(1, workers), request.evaluator)
    return JobSpec(
        job_id=f"{name[:90]}-{secrets.token_hex(3)}",
        name=name,
        cache=request.cache,
        command=request.command,
        workers=workers,
        shards=workers if request.shards is None else request.shards,
        ps=len(topology.nodes) if request.ps is None else request.ps,
        ps_backups=request.ps_backups,
        chief=request.chief,
        evaluator=request.evaluator,
        engine="local" if hosts is None else HOSTS_ENGINE,
        max_restarts=request.max_restarts,
        seed=request.seed,
        threads=threads if request.given_threads is None else request.given_threads,
        stall_timeout=request.stall_timeout,
        created=time.time(),
        settings=find_inherited_settings(request.settings) | _list_settings(request),
        on_loss=request.on_loss,
        on_rebalance=request.on_rebalance,
        standby=request.standby,
        memory_checkpoint=request.memory_checkpoint,
        gpus_per_worker=request.gpus_per_worker,
        memory_per_worker=request.memory_per_worker,
        cores_per_worker=request.cores_per_worker,
        refresh=request.refresh,
        nodes=topology.nodes if request.nodes else (),
        on_take_over=request.on_take_over,
    )


def _keep_environment(request: Request) -> JobEnvironment:
    """Return what is kept of this process and its machine. Raises JobSpecError for a wrong --env."""
    shell = resolve_paths(os.environ)
    variables, secrets = choose_variables(shell, request.env, os.path.isfile)
    return JobEnvironment(
        variables,
        () if request.on_take_over == "resume" else secrets,
        read_host(),
        read_versions(),
        read_keras_settings(shell),
        str(request.job_dir.absolute()) if request.job_dir.is_dir() else "",
    )


def find_withheld_secrets(request: Request) -> tuple[str, ...]:
    """Return the secrets of this process's environment that the job doesn't get, by their names: where it
    goes on by itself, nobody could give them."""
    if request.on_take_over != "resume":
        return ()
    return choose_variables(os.environ, os.environ.keys() & request.env, os.path.isfile)[1]


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))


def _list_settings(request: Request) -> dict[str, str]:
    allowed = {
        ALLOW_UNAUTHENTICATED_ENV: request.allow_unauthenticated,
        ALLOW_MIXED_ENV: request.allow_mixed_processors,
    }
    return request.settings.to_environment() | {name: "1" for name, given in allowed.items() if given}


def find_inherited_settings(given: DeviceSettings) -> dict[str, str]:
    """Return the settings in this process's environment that belong to a job from its start on, but for those
    that are `given`. Raises InputError for a value of another form."""
    found = read_settings(os.environ).to_environment()
    if os.environ.get(ALLOW_UNAUTHENTICATED_ENV) == "1":
        found[ALLOW_UNAUTHENTICATED_ENV] = "1"
    return {name: value for name, value in found.items() if name not in given.to_environment()}


def _choose_name(request: Request, cache: CacheSpec | None) -> str:
    """Return the beginning of the job's id: the last part of the cache's name, or of the job's folder."""
    if cache is not None:
        return re.sub(r"[^A-Za-z0-9_.-]", "-", cache.name.rpartition("/")[2])
    folder = re.sub(r"[^A-Za-z0-9_.-]", "-", request.job_dir.absolute().stem)
    return folder.lstrip(".-") or "job"


@contextlib.contextmanager
def _staged(paths: Paths, job_id: str) -> Iterator[tuple[JobPaths, int]]:
    """Yield a folder for the job that isn't visible yet, and its lock; remove it after an error."""
    make_sticky_folder(paths.home, paths.jobs)
    staged = staged_folder(paths, job_id)
    staged.root.mkdir(mode=0o700)
    try:
        yield staged, take_lock(staged.controller)
    except BaseException:
        shutil.rmtree(staged.root, ignore_errors=True)
        raise


def _write(
    job: JobPaths,
    spec: JobSpec,
    placement: Placement,
    cache: CacheSpec,
    everywhere: Sequence[NodeId],
    topology: Topology,
    environment: JobEnvironment,
) -> None:
    """Write everything that the controller and the tasks read. `everywhere`: nodes on which any shard can
    run, since none has data. `topology`: the nodes that the job may use."""
    secret = os.open(job.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(secret, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
    write_environment(job, environment)
    job.spec.write_text(json.dumps(spec.to_json(), indent=1))
    tasks = [{"task": str(t.task), "node": t.node, "shards": t.shards} for t in placement.tasks]
    job.placement.write_text(
        json.dumps({"tasks": tasks, "homes": placement.home_nodes, "cache": cache.to_json()}, indent=1)
    )
    job.shard_maps.mkdir()
    shards = {**asdict(placement.shard_map), "homes": placement.home_nodes}
    job.shard_map(cache.name).write_text(json.dumps(shards, indent=1))
    for task in placement.tasks:
        job.task(task.task).mkdir(parents=True)
    job.checkpoints.mkdir()
    job.ledger.mkdir()
    job.output.touch(0o600)
    found = find_shard_holders(placement.shard_map, placement.home_nodes, cache)
    holders = tuple(tuple(node for node in own if node in topology.nodes) for own in found)
    if everywhere:
        holders = tuple((home, *(n for n in everywhere if n != home)) for home in placement.home_nodes)
    state = new_job(
        placement.tasks,
        spec.max_restarts,
        spec.on_loss,
        holders,
        mirrored=spec.ps_backups > 0,
        evaluator_grace=spec.evaluator_grace,
    )
    Journal(job.journal).create(state)


def resolve_paths(given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for another folder: relative paths in it become absolute ones."""
    found = dict(given)
    if "PYTHONPATH" in found:
        parts = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts if part)
    for name in _FILES_OF_IGNITE:
        if found.get(name):
            found[name] = os.path.abspath(found[name])
    return found


def start_supervisor(job: JobPaths, lock: int, shell: Mapping[str, str] | None = None) -> None:
    """Start the process that runs the job, and hand it the lock. Raises ClusterError.

    Tasks find the variables that the job keeps. Others are those of `shell`, by default this process's.
    """
    shell = resolve_paths(os.environ if shell is None else shell)
    environment = compose_environment(read_environment(job), shell, read_host())
    environment[HOME_ENV] = str(job.root.parent.parent)
    command = [sys.executable, "-P", "-m", "insitu.cluster.control.supervisor", str(job.root), str(lock)]
    with job.controller_log.open("ab") as log:
        try:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=job.root,
                env=environment,
                pass_fds=(lock,),
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(
                f"Can't start the job's supervisor: {error}. Check the memory and the number of processes "
                "that "
                "this user may have (ulimit -u)"
            ) from error
    # Those that have ended by now are reaped, for a process that starts many jobs.
    _supervisors[:] = [s for s in (*_supervisors, started) if s.poll() is None]
