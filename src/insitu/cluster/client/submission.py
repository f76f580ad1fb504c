"""Makes a job: checks the options, places the tasks, writes the job's folder, starts its supervisor.

Until the folder is renamed into place nothing of the job is there, and a failure leaves nothing behind. The
next `start` removes a folder whose maker was killed.
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
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Literal

from insitu.base.config import DeviceSettings, read_settings
from insitu.base.context import ALLOW_MIXED_ENV
from insitu.base.disk.access import make_sticky_folder
from insitu.base.disk.durable import sync_folder, sync_tree
from insitu.base.errors import ClusterError, InputError, InsituError, JobSpecError, StorageFull
from insitu.base.net.unauthenticated import ALLOW_UNAUTHENTICATED_ENV
from insitu.base.paths import HOME_ENV, JobPaths, Paths
from insitu.base.plugins import CONNECTORS, ENGINES, EXTENSIONS, list_plugins, load_plugin
from insitu.base.process.processes import read_available_bytes, read_host
from insitu.base.spec import NO_CACHE, CacheSpec, JobSpec, NodeId, Placement, Topology, check_simple_name
from insitu.base.tracking import TRACK_ENV, parse_tracking
from insitu.base.wording import format_count, inflect
from insitu.cluster.client.host_nodes import (
    HostNodes,
    check_cores,
    check_gpus,
    check_memory,
    check_reach,
    choose_host_threads,
    choose_nodes,
    find_host_nodes,
    find_starter,
    prefer_live_owners,
)
from insitu.cluster.client.job_code import copy_code, open_code
from insitu.cluster.client.kept_environment import choose_variables, compose_environment
from insitu.cluster.client.start_conditions import check_file_size_limit, read_keras_settings
from insitu.cluster.control import clean_up, staged_folder
from insitu.cluster.decide import (
    EVALUATOR_GRACE,
    choose_thread_count,
    choose_worker_count,
    find_shard_holders,
    make_empty_cache,
    new_job,
    place_tasks,
)
from insitu.cluster.engines import count_free_gpus
from insitu.cluster.job_files import JobEnvironment, Journal, read_environment, take_lock, write_environment
from insitu.cluster.leases import SECRET_BYTES, claim_job, forget_job
from insitu.cluster.task import ResolvedCommand, find_insitu_import, resolve_command
from insitu.cluster.wire import HOSTS_ENGINE, read_versions
from insitu.grid import Catalog, check_here, load_topology
from insitu.options import JobOptions

_LaidOut = tuple[JobSpec, CacheSpec | None, Topology, HostNodes | None]
_supervisors: list[subprocess.Popen[bytes]] = []
"""Supervisors that this process has started and not reaped yet."""


def submit(paths: Paths, options: JobOptions) -> str:
    """Make the job and start its supervisor, which outlives this process. Returns the job's id.

    Raises InputError or one of its kinds for what can't be used, StorageFull if the disk is full.
    """
    laid_out = spec, _, topology, hosts = _lay_out(paths, options)
    clean_up(paths, spec.cache)
    job = paths.job(spec.job_id)
    lock = -1
    try:
        with _staged(paths, spec.job_id) as (staged, lock):
            copy_code(options.job_dir, staged.code, paths.home)
            spec, cache, placement = _place(paths, options, laid_out, staged.code)
            has_cache = spec.cache != NO_CACHE
            everywhere = topology.nodes if hosts is not None and not has_cache else ()
            _write(staged, spec, placement, cache, everywhere, topology, _keep_environment(options))
            sync_tree(staged.root)
            if has_cache:
                Catalog(paths).pin(cache.name, cache.version, spec.job_id)
            staged.root.rename(job.root)
            sync_folder(paths.jobs)
        claim_job(job)
        start_supervisor(job, lock)
    except BaseException as error:
        Catalog(paths).unpin(spec.job_id)
        with contextlib.suppress(InsituError):
            forget_job(paths, spec.job_id)
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


def check_job(paths: Paths, options: JobOptions) -> None:
    """Raise what `submit` raises before it reads JOB_DIR. Nothing is made."""
    _keep_environment(options)
    _lay_out(paths, options)


def find_problems(paths: Paths, options: JobOptions) -> list[str]:
    """Return why `submit` would refuse this, as far as nothing has to be made or copied for that."""
    problems, laid_out = list[str](), None
    try:
        _keep_environment(options)
        laid_out = _lay_out(paths, options)
    except InsituError as error:
        problems.append(error.message)
    try:
        with open_code(options.job_dir) as code:
            resolve_command(code, options.command, sys.executable)
            if laid_out is not None:
                _place(paths, options, laid_out, code)
    except InsituError as error:
        problems.append(error.message)
    return problems


def _lay_out(paths: Paths, options: JobOptions) -> _LaidOut:
    """Return the specification of a job by what was asked for, with the cache and the nodes that it uses."""
    if options.track:
        load_plugin(EXTENSIONS, "tracking").check_tracker(parse_tracking(options.track))
    cache = Catalog(paths).get_named(options.cache) if options.cache != NO_CACHE else None
    hosts = find_host_nodes(paths, options.engine, cache)
    topology = hosts.topology if hosts else load_topology(paths)
    if options.nodes:
        topology = choose_nodes(topology, options.nodes, cache)
        hosts = None if hosts is None else hosts.restrict_to(topology)
    if options.refresh:
        _check_refresh(options, cache)
    cache = _choose_copies(paths, options, cache, topology, on_hosts=hosts is not None)
    spec = _spec(options, cache, topology, hosts)
    if spec.starter:
        load_plugin(ENGINES, spec.starter).check(spec)
    elif spec.pod:
        raise JobSpecError(
            f"--pod describes the pods of a job that --engine k8s makes. Received: --pod {spec.pod[0]} "
            f"without it. Leave it out, or give --engine k8s"
        )
    return spec, cache, topology, hosts


def _place(
    paths: Paths, options: JobOptions, laid_out: _LaidOut, code: Path
) -> tuple[JobSpec, CacheSpec, Placement]:
    """Return the specification for the script in `code`, and the nodes on which tasks run and read."""
    spec, cache, topology, hosts = laid_out
    spec = assign_roles(
        spec,
        knows_insitu=imports_insitu(code, resolve_command(code, spec.command, sys.executable)),
        shards=options.shards,
        grace=options.evaluator_grace,
        cores=_count_cores() if options.given_threads is None else None,
    )
    cache = cache or make_empty_cache(spec.shards, topology)
    placement = place_tasks(spec, cache, topology)
    return _fit_to_hosts(paths, options, spec, placement, hosts), cache, placement


def _check_refresh(options: JobOptions, cache: CacheSpec | None) -> None:
    """Raise JobSpecError if a job can't read rows again."""
    origin = {} if cache is None or cache.origin is None else dict(cache.origin)
    if "servers" not in origin:
        raise JobSpecError(
            f"--refresh is for jobs on a partitioned table of another system, or on a snapshot of one. "
            f"Received: {options.cache}. Leave it out, or start the job on a table, such as ignite://HOST/CACHE"
        )
    if options.ps != 0:
        raise JobSpecError(
            "--refresh is for workers that train in step. Received: parameter servers. Give --ps 0, or start "
            "a job for the rows of now"
        )


def _choose_copies(
    paths: Paths, options: JobOptions, cache: CacheSpec | None, topology: Topology, *, on_hosts: bool
) -> CacheSpec | None:
    """Return the cache with the owners that tasks read from first. Raises GridError if tasks run on this
    machine and partitions aren't here."""
    if cache is None:
        return None
    if not on_hosts:
        check_here(paths, cache, range(len(cache.partitions)))
    return prefer_live_owners(cache, topology) if on_hosts or options.nodes else cache


def _fit_to_hosts(
    paths: Paths, options: JobOptions, spec: JobSpec, placement: Placement, hosts: HostNodes | None
) -> JobSpec:
    """Return the specification with what depends on the hosts that tasks are placed on.

    Raises ClusterError, PlacementError if these can't train together.
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
    if not spec.starter:  # which has places made for what tasks need
        if spec.gpus_per_worker:
            check_gpus(placement, spec.gpus_per_worker, hosts.gpus)
        if spec.memory_per_worker:
            check_memory(placement, spec.memory_per_worker, hosts.memory)
        if spec.cores_per_worker:
            check_cores(placement, spec.cores_per_worker, hosts.cores)
    check_reach(paths, {task.node for task in placement.tasks})
    if options.given_threads is not None:
        return spec
    if spec.starter:
        return replace(spec, threads=max(1, spec.cores_per_worker))
    return replace(spec, threads=choose_host_threads(placement, hosts.cores))


def _check_own_gpus(placement: Placement, each: int) -> None:
    """Raise PlacementError if this machine, which all nodes are, has too few GPUs that no task has."""
    free, known = count_free_gpus()
    here = NodeId(
        f"this machine, of whose {format_count(known, 'GPU')} {known - free} "
        f"{inflect(known - free, 'is', 'are')} taken,"
    )
    check_gpus(_gather(placement, here), each, {here: free})


def _check_own_memory(placement: Placement, each: int) -> None:
    """Raise PlacementError if this machine, which all nodes are, has less memory free than tasks need."""
    here = NodeId("this machine")
    check_memory(_gather(placement, here), each, {here: read_available_bytes()})


def _gather(placement: Placement, node: NodeId) -> Placement:
    """Return the placement with all tasks on one node."""
    return replace(placement, tasks=tuple(replace(task, node=node) for task in placement.tasks))


def _spec(
    options: JobOptions, cache: CacheSpec | None, topology: Topology, hosts: HostNodes | None
) -> JobSpec:
    check_file_size_limit()
    beside_data = len(topology.nodes) if cache is None else choose_worker_count(cache, topology)
    workers = beside_data if options.workers is None else options.workers
    if options.workers is None and options.shards is not None:
        workers = min(workers, max(1, options.shards))
    name = options.name or _choose_name(options, cache)
    check_simple_name("A job's name (--name)", name)
    threads = choose_thread_count(_count_cores(), max(1, workers), options.evaluator)
    # Fields that aren't worked out here are as given.
    same = {each.name: getattr(options, each.name, None) for each in fields(JobSpec)}
    return JobSpec(
        **{each: value for each, value in same.items() if value is not None}
        | {
            "job_id": f"{name[:90]}-{secrets.token_hex(3)}",
            "name": name,
            "cache": NO_CACHE if cache is None else cache.name,
            "workers": workers,
            "shards": workers if options.shards is None else options.shards,
            "ps": len(topology.nodes) if options.ps is None else options.ps,
            "engine": (options.engine or "local") if hosts is None else HOSTS_ENGINE,
            "starter": options.engine if hosts is not None and find_starter(options.engine) else "",
            "threads": threads if options.given_threads is None else options.given_threads,
            "created": time.time(),
            "settings": find_inherited_settings(options.settings) | _list_settings(options),
            "nodes": topology.nodes if options.nodes else (),
        }
    )


def _keep_environment(options: JobOptions) -> JobEnvironment:
    """Return what is kept of this process and its machine. Raises JobSpecError for a wrong --env."""
    shell = resolve_paths(os.environ)
    surely_secret = _list_variables("secrets") if options.env else ()
    variables, secrets = choose_variables(shell, options.env, os.path.isfile, surely_secret)
    return JobEnvironment(
        variables,
        secrets,
        read_host(),
        read_versions(),
        read_keras_settings(shell),
        str(options.job_dir.absolute()) if options.job_dir.is_dir() else "",
    )


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))


def _list_settings(options: JobOptions) -> dict[str, str]:
    allowed = {
        ALLOW_UNAUTHENTICATED_ENV: options.allow_unauthenticated,
        ALLOW_MIXED_ENV: options.allow_mixed_processors,
    }
    tracked = {TRACK_ENV: options.track} if options.track else {}
    given = {name: "1" for name, given in allowed.items() if given}
    return options.settings.to_environment() | tracked | given


def find_inherited_settings(given: DeviceSettings) -> dict[str, str]:
    """Return the settings in this process's environment that belong to a job from its start on, but for those
    that are `given`. Raises InputError for a value of another form."""
    found = read_settings(os.environ).to_environment()
    if os.environ.get(ALLOW_UNAUTHENTICATED_ENV) == "1":
        found[ALLOW_UNAUTHENTICATED_ENV] = "1"
    return {name: value for name, value in found.items() if name not in given.to_environment()}


def _choose_name(options: JobOptions, cache: CacheSpec | None) -> str:
    """Return the beginning of the job's id: the last part of the cache's name, with the one before if it is
    that of a split; or the name of the job's folder."""
    if cache is not None:
        parts = cache.name.split("/")
        name = "-".join(parts[-2:] if parts[-1] in ("train", "test", "val", "validation") else parts[-1:])
        return re.sub(r"[^A-Za-z0-9_.-]", "-", name)
    folder = re.sub(r"[^A-Za-z0-9_.-]", "-", options.job_dir.absolute().stem)
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
    for name in _list_variables("files"):
        if found.get(name):
            found[name] = os.path.abspath(found[name])
    return found


def _list_variables(kind: Literal["files", "secrets"]) -> list[str]:
    """Return the variables of all connectors that name files, or that surely are secrets."""
    found = list[str]()
    for scheme in list_plugins(CONNECTORS):
        with contextlib.suppress(InputError):  # of a broken package, which is named to who uses it
            found += getattr(load_plugin(CONNECTORS, scheme), kind, ())
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
                "that this user may have (ulimit -u)"
            ) from error
    # Those that have ended by now are reaped, for a process that starts many jobs.
    _supervisors[:] = [s for s in (*_supervisors, started) if s.poll() is None]


# Decides what --chief and --evaluator mean for a job's script.
#
# To insitu's strategies a chief is worker 0, which trains a shard and does what one does for all; an
# evaluator reads checkpoints. Scripts that use TensorFlow alone have a chief task that coordinates. So what
# counts is whether the job's code imports insitu. It is read, not run


SCORING_GRACE = 600.0
"""Seconds that an evaluator which knows insitu has, by default, to score the last checkpoint."""


def imports_insitu(folder: Path, command: ResolvedCommand) -> bool:
    """Return whether the code in `folder` that the command may run imports insitu."""
    # A program may run any file of the folder.
    starts = [Path(command.arguments[0])] if command.script else sorted(folder.rglob("*.py"))
    return find_insitu_import(folder.absolute(), [s.absolute() for s in starts]) is not None


def assign_roles(
    spec: JobSpec, *, knows_insitu: bool, shards: int | None, grace: float | None, cores: int | None
) -> JobSpec:
    """Return `spec` with the tasks that --chief and --evaluator stand for.

    A chief of a script that imports insitu is one more worker, the first, with a shard of its own. `shards`
    and the evaluator's `grace` are those that were given, None for the defaults; `cores` are those that the
    default number of threads shares out, None if that number was given.
    """
    default = SCORING_GRACE if knows_insitu else EVALUATOR_GRACE
    spec = replace(spec, evaluator_grace=default if grace is None else grace)
    if not (spec.chief and knows_insitu):
        return spec
    workers = spec.workers + 1
    threads = spec.threads if cores is None else choose_thread_count(cores, workers, spec.evaluator)
    return replace(
        spec, chief=False, workers=workers, shards=workers if shards is None else shards, threads=threads
    )
