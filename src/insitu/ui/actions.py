"""What users change: used by the REST interface and by the page alike. Each runs in a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.cluster import Request, Shell, find_job, resume_job, scale_job, stop_job, submit
from insitu.errors import InputError
from insitu.grid import Catalog
from insitu.paths import JobPaths
from insitu.processes import read_available_bytes
from insitu.service import has_summaries, list_nodes, make_tensorboard_command
from insitu.spec import NO_CACHE
from insitu.ui.boards import check_reach
from insitu.ui.forms import ImportForm, StartForm, format_command_line
from insitu.ui.state import UIState
from insitu.ui.uploads import MAX_ZIP


@contextlib.contextmanager
def _job_folder(state: UIState, form: StartForm) -> Iterator[Path]:
    """Yield the job's folder or .zip. An upload is removed once the job has been started with it."""
    if (form.job_dir is None) == (form.upload is None):
        raise InputError(
            "A job has one of job_dir and upload. Received: " + ("both" if form.upload else "none")
        )
    if form.upload is None:
        yield Path(form.job_dir or "").expanduser()
        return
    archive = state.uploads.find(form.upload)
    if archive.stat().st_size > MAX_ZIP:
        raise InputError(
            f"A .zip with a job has {MAX_ZIP >> 20} MiB at most. Received: {archive.stat().st_size:,} bytes. "
            f"Import data into a cache, and send code alone"
        )
    yield archive
    state.uploads.remove(form.upload)


def check_start(state: UIState, form: StartForm) -> dict[str, Any]:
    """Return the command line of a job, and what is wrong with it as far as that can be found beforehand."""
    problems: list[str] = []
    if form.cache != NO_CACHE:
        with _noting(problems):
            cache = Catalog(state.paths).get(form.cache)
            asked = form.shards or form.workers or 1
            if asked > len(cache.partitions):
                raise InputError(
                    f"Each shard has a partition of its own. Received: {asked} workers or shards, and "
                    f"{form.cache} has {len(cache.partitions)} partitions"
                )
    if form.nodes:
        with _noting(problems):
            names = [each["node"] for each in list_nodes(state.paths)]
            if unknown := [node for node in form.nodes if node not in names]:
                raise InputError(f"Nodes are {', '.join(names)}. Received: {', '.join(unknown)}")
    if form.memory_per_worker:
        with _noting(problems):
            _check_memory(state, form.memory_per_worker, form.workers or 1)
    folder = Path(form.job_dir or "JOB_DIR").expanduser()
    with _noting(problems):
        if form.upload is not None:
            folder = Path(state.uploads.find(form.upload).name)
        elif form.job_dir is None:
            raise InputError("A job needs a folder or a .zip with its script")
        elif not folder.exists():
            raise InputError(f"JOB_DIR {folder} doesn't exist on this machine")
        elif folder.is_dir() and form.command[0].endswith(".py") and not (folder / form.command[0]).exists():
            raise InputError(f"JOB_DIR {folder} holds no {form.command[0]}")
    return {"command_line": format_command_line(form.to_request(folder)), "problems": problems}


def _check_memory(state: UIState, each: int, workers: int) -> None:
    """Raise InputError where all nodes together have less memory free than the workers need."""
    found = [node["memory_available"] for node in list_nodes(state.paths)]
    hosts = [available for available in found if available is not None]
    free = sum(hosts) if hosts else read_available_bytes()
    if free < (each << 20) * workers:
        raise InputError(
            f"Each worker finds {each:,} MiB of memory free. Received: {workers} worker(s), and "
            f"{free >> 20:,} MiB that are free"
        )


@contextlib.contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        problems.append(error.message)


def start_job(state: UIState, form: StartForm) -> dict[str, Any]:
    """Start a job. Returns its id and its command line. Raises InputError, StorageFull, ClusterError."""
    with _job_folder(state, form) as folder:
        request: Request = form.to_request(folder)
        job_id = submit(state.paths, request)
    return {"job_id": job_id, "command_line": format_command_line(request)}


def find(state: UIState, job_id: str) -> JobPaths:
    """Return the job. Raises UnknownJob."""
    return find_job(state.paths, job_id)


def stop(state: UIState, job_id: str) -> dict[str, Any]:
    """Ask a job to stop; asked again, its tasks are killed. Raises JobEnded, ClusterError."""
    job = find(state, job_id)
    stop_job(job)
    return {"job_id": job.root.name}


def resume(state: UIState, job_id: str, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Let a job go on that has ended, with some variables of the caller. Raises InputError, ClusterError."""
    job = find(state, job_id)
    notices: list[str] = []
    resume_job(job, Shell.of_server(given), notices.append)
    return {"job_id": job.root.name, "notices": notices}


def scale(state: UIState, job_id: str, workers: int) -> dict[str, Any]:
    """Give a job another number of workers. Raises JobEnded, InputError, ClusterError."""
    job = find(state, job_id)
    return {"job_id": job.root.name, "reply": scale_job(job, workers)}


def start_board(state: UIState, job_id: str) -> dict[str, Any]:
    """Start TensorBoard on what a job has written, for this machine. Raises InputError, ClusterError."""
    check_reach(state.url)
    job = find(state, job_id)
    if not has_summaries(job):
        raise InputError(
            f"{job.root.name} has written nothing for TensorBoard yet. Pass insitu.TensorBoard() to fit as a "
            f"callback"
        )
    return {
        "job_id": job.root.name,
        "url": state.boards.start(job.root.name, make_tensorboard_command(job, "127.0.0.1", 0)),
    }


def start_import(state: UIState, form: ImportForm) -> dict[str, Any]:
    """Start an import. Raises InputError."""
    upload = form.upload
    if bool(form.sources) == (upload is not None):
        raise InputError(
            "An import has one of sources and upload. Received: " + ("both" if upload else "none")
        )
    sources = form.sources if upload is None else list(map(str, state.uploads.list_files(upload)))
    for source in sources:
        if "://" in source and not source.startswith("ignite://"):
            raise InputError(f"A source is a path, or ignite://HOST/CACHE. Received: {source}")
    return state.imports.start(form.cache, sources, form.to_options(), lambda: state.uploads.remove(upload))


def describe_cache(state: UIState, name: str) -> dict[str, Any]:
    """Return the report of a cache. Raises UnknownCache."""
    from insitu.grid import find_slow_copies
    from insitu.service import build_cache_report

    catalog = Catalog(state.paths)
    cache = catalog.get(name)
    return build_cache_report(cache, catalog.pinned_by(name), find_slow_copies(state.paths, cache), None)


def list_caches(state: UIState) -> list[dict[str, Any]]:
    """Return all caches."""
    from insitu.service import summarize_cache

    return [summarize_cache(cache) for cache in state.catalog.read().latest]
