"""Actions of users, shared by the REST interface and the page. Each runs in a thread."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths
from insitu.cluster import Shell, find_job, find_problems, resume_job, scale_job, stop_job, submit
from insitu.grid import Catalog
from insitu.options import format_options
from insitu.service import has_summaries, make_tensorboard_command
from insitu.ui.boards import check_reach
from insitu.ui.forms import ImportForm, StartForm
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
    state.uploads.use(form.upload)
    try:
        yield _check_archive(archive)
    finally:
        state.uploads.end_use(form.upload)
    state.uploads.remove(form.upload)


def _check_archive(archive: Path) -> Path:
    if archive.stat().st_size > MAX_ZIP:
        raise InputError(
            f"A .zip with a job has {MAX_ZIP >> 20} MiB at most. Received: {archive.stat().st_size:,} bytes. "
            f"Import data into a cache, and send code alone"
        )
    return archive


def check_start(state: UIState, form: StartForm) -> dict[str, Any]:
    """Return the command line of a job, and what is wrong with it as far as that can be found beforehand.

    Raises InputError for an option of another form.
    """
    options = form.to_options(Path(form.job_dir or "JOB_DIR").expanduser())
    try:
        folder = options.job_dir
        if form.upload is not None:
            folder = state.uploads.find(form.upload)
            options = replace(options, job_dir=Path(folder.name))
        elif form.job_dir is None:
            raise InputError("A job needs a folder or a .zip with its script")
        problems = find_problems(state.paths, replace(options, job_dir=folder))
    except InputError as error:
        problems = [error.message]
    return {"command_line": shlex.join(options.format_command()), "problems": problems}


def start_job(state: UIState, form: StartForm) -> dict[str, Any]:
    """Start a job. Returns its id and its command line. Raises InputError, StorageFull, ClusterError."""
    with _job_folder(state, form) as folder:
        options = form.to_options(folder)
        job_id = submit(state.paths, options)
    return {"job_id": job_id, "command_line": shlex.join(options.format_command())}


def find(state: UIState, job_id: str) -> JobPaths:
    """Return the job. Raises UnknownJob."""
    return find_job(state.paths, job_id)


def stop(state: UIState, job_id: str) -> dict[str, Any]:
    """Ask a job to stop; asked again, its tasks are killed. Raises JobEnded, ClusterError."""
    job = find(state, job_id)
    stop_job(job)
    return {"job_id": job.root.name}


def resume(state: UIState, job_id: str, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Resume a job that has ended, with some variables of the caller. Raises InputError, ClusterError."""
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
    from insitu.grid.sources import find_connector

    upload, options = form.upload, format_options(form.to_options())
    if bool(form.sources) == (upload is not None):
        raise InputError(
            "An import has one of sources and upload. Received: " + ("both" if upload else "none")
        )
    if upload is None:
        for source in form.sources:
            if "://" in source and find_connector(source) is None:
                raise InputError(
                    f"A source is a path, or a table of another system, such as ignite://HOST/CACHE. "
                    f"Received: {source}"
                )
        return state.commands.start_import(form.cache, form.sources, options, lambda: None)

    def end() -> None:
        state.uploads.end_use(upload)
        state.uploads.remove(upload)

    files = list(map(str, state.uploads.use(upload)))
    try:
        return state.commands.start_import(form.cache, files, options, end)
    except BaseException:
        state.uploads.end_use(upload)
        raise


def describe_cache(state: UIState, name: str) -> dict[str, Any]:
    """Return the report of a cache. Raises UnknownCache."""
    from insitu.service import build_cache_report

    catalog = Catalog(state.paths)
    cache = catalog.get(name)
    return build_cache_report(cache, catalog.pinned_by(name), None)


def list_caches(state: UIState) -> list[dict[str, Any]]:
    """Return all caches."""
    from insitu.service import summarize_cache

    return [summarize_cache(cache) for cache in state.catalog.read().latest]
