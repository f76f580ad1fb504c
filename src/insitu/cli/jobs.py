"""Commands that start, stop and list jobs: start, resume, scale, stop, ps."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.base.errors import InputError, UnknownJob
from insitu.base.paths import Paths
from insitu.cli.caller import find_caller
from insitu.cli.command_group import START_EXAMPLES, StartCommand, take_options
from insitu.cli.completion import complete_node, complete_start
from insitu.cli.connected import read_live_cache
from insitu.cli.console import (
    JsonOption,
    format_cell,
    format_duration,
    format_position,
    format_size,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.logs import JobArgument, PrefixOption, stream
from insitu.cli.remote import head_of_command, send_job
from insitu.options import JobOptions
from insitu.service import summarize_job

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths


CacheArgument = Annotated[
    str,
    typer.Argument(
        metavar="CACHE",
        help="The cache to train on, or ignite://HOST[:PORT][,HOST...]/NAME; - for none.",
        autocompletion=complete_start,
    ),
]
START_ARGUMENTS = {
    "cache": CacheArgument,
    "job_dir": Annotated[Path, typer.Argument(metavar="JOB_DIR", help="Folder or .zip with the script.")],
    "command": Annotated[
        list[str], typer.Argument(metavar="JOB_CMD [JOB_ARGS]", help="Command to run in JOB_DIR.")
    ],
}
"""The arguments of `start`, by the fields of JobOptions."""


def start(options: JobOptions) -> None:
    from insitu.cluster import submit

    require_detach(options.detach, options.as_json)
    if (head := head_of_command()) is not None:
        raise typer.Exit(send_job(head, options))
    paths = Paths.default()
    with _received(options) as options:
        options = read_live_cache(options)
        job_id = submit(paths, options)
    print_started(paths.job(job_id), options.detach, options.as_json)
    _tell_of_shell(options)
    if not options.detach:
        raise typer.Exit(stream(paths.job(job_id), prefix=options.prefix))


@contextlib.contextmanager
def _received(options: JobOptions) -> Iterator[JobOptions]:
    """Yield the options with the JOB_DIR that a caller sends, once the others are known to make a job."""
    caller = find_caller()
    if caller is None:
        yield options
        return
    from insitu.cluster import check_job
    from insitu.grid.sources import find_connector

    for name, value in caller.variables.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
    if find_connector(options.cache) is None:
        check_job(Paths.default(), options)
    with caller.received(Paths.default()) as (archive,):
        yield replace(options, job_dir=archive)


def require_detach(detach: bool, as_json: bool) -> None:
    """Raise InputError if --json is given and the standard output gets what the training prints."""
    if as_json and not detach:
        raise InputError(
            "--json goes with --detach: else the standard output has what the training prints. Received: "
            "--json alone"
        )


def print_started(job: JobPaths, detach: bool, as_json: bool) -> None:
    """Print the id of a job that has been started: as the result, if its output doesn't follow."""
    if as_json:
        print_job(job)
    elif detach:
        typer.echo(job.root.name)
    else:
        print_notice(job.root.name)


def print_job(job: JobPaths) -> None:
    """Print a job as JSON, as `ps --json` lists it."""
    from insitu.cluster import read_status

    print_json(summarize_job(read_status(job)))


def _tell_of_shell(options: JobOptions) -> None:
    """Print which settings of this shell the job has taken over."""
    from insitu.cluster import find_inherited_settings

    if inherited := find_inherited_settings(options.settings):
        listed = " ".join(f"{name}={value}" for name, value in inherited.items())
        print_notice(f"Settings of this shell that the job has taken over: {listed}")


def resume(
    job_id: JobArgument,
    detach: Annotated[bool, typer.Option("--detach", help="Don't stream the output.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable that the job takes from this shell, set or not."),
    ] = None,
    lost_at: Annotated[int | None, typer.Option("--lost-at", hidden=True)] = None,
    prefix: PrefixOption = True,
    as_json: JsonOption = False,
) -> None:
    """Let a job that was stopped, has failed or lost its machine continue from its last checkpoint.

    Shards, seed and variables stay the same, so it ends with the weights of a job that was never interrupted.
    Secrets aren't kept with a job: it takes those of this shell. If the machine of the job is lost, its hosts
    keep copies: after `insitu up --replace-head` the newest one is brought to this machine. Exits with 3 if
    the job has finished, with 2 if it runs.

    Examples:

        insitu resume digits-3fa9c1
    """
    from insitu.cluster import Shell, find_or_restore_job, resume_job, resume_lost_job

    if lost_at is not None:  # the head does it
        resume_lost_job(Paths.default(), job_id, lost_at, print_notice)
        return
    require_detach(detach, as_json)
    job = find_or_restore_job(Paths.default(), job_id, print_notice)
    shell = Shell(os.environ, tuple(env or ()))
    if (caller := find_caller()) is not None:
        shell = Shell.of_server(caller.variables)
    lines: list[str] = []
    start = resume_job(job, shell, lines.append)
    print_started(job, detach, as_json)
    for line in lines if detach else ():  # they are in the output, too
        print_notice(line)
    if not detach:
        raise typer.Exit(stream(job, prefix=prefix, start=start))


def scale(
    job_id: JobArgument,
    workers: Annotated[int, typer.Argument(metavar="N", help="New number of workers, from 1 to its shards.")],
    as_json: JsonOption = False,
) -> None:
    """Give a running job more workers, or fewer. Its shards and its final weights stay the same.

    Examples:

        insitu scale digits-3fa9c1 4
    """
    from insitu.cluster import find_job, scale_job

    job = find_job(Paths.default(), job_id)
    print_notice(scale_job(job, workers))
    if as_json:
        print_job(job)


def stop(job_id: JobArgument, as_json: JsonOption = False) -> None:
    """Stop a job: its tasks get SIGTERM, and SIGKILL ten seconds later. A second `stop` kills at once.

    Waits until nothing of the job runs any more. A controller or supervisor that doesn't answer is killed.
    Exits with 3 if the job had ended already.

    Examples:

        insitu stop digits-3fa9c1
    """
    from insitu.cluster import find_job, forget_job

    try:
        job = find_job(Paths.default(), job_id)
    except UnknownJob:
        if not forget_job(Paths.default(), job_id):
            raise
        print_notice(f"{job_id} isn't started again")
        return
    stop_and_wait(job)
    if as_json:
        print_job(job)


def stop_and_wait(job: JobPaths) -> None:
    """Stop a job and wait until nothing of it runs any more. Raises JobEnded if it has ended already."""
    from insitu.cluster import end_job, read_status

    end_job(job, print_notice)
    print_notice(f"{job.root.name} has ended: {read_status(job).state.phase}")


def ps(
    all_jobs: Annotated[bool, typer.Option("--all", "-a", help="Show jobs that have ended, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the running jobs.

    DURATION is the time since the start, of a job that has ended until its end. SIZE is that of the job's
    folder; `insitu prune` deletes jobs that have ended. REASON says why a job failed or was stopped;
    `insitu describe JOB` shows all of it.

    Examples:

    ```
    insitu ps
    insitu ps --all --json
    ```
    """
    from insitu.cluster import BrokenJob, list_jobs, measure_job

    paths, listed = Paths.default(), []
    for job in list_jobs(paths, all_jobs=all_jobs):
        size = None if isinstance(job, BrokenJob) else measure_job(paths.job(job.spec.job_id))
        listed.append({**summarize_job(job), "bytes": size})
    print_jobs(listed, all_jobs, as_json)


def print_jobs(jobs: list[dict[str, Any]], all_jobs: bool, as_json: bool) -> None:
    """Print jobs as `summarize_job` of `insitu.service` returns them."""
    if as_json:
        print_json(jobs)
    elif jobs:
        header = (
            "JOB",
            "STATE",
            "CACHE",
            "TASKS",
            "ATTEMPT",
            "PROGRESS",
            "DURATION",
            "SIZE",
            "EXIT",
            "REASON",
        )
        print_table(header, map(_format_row, jobs))
    else:
        print_notice(
            "No jobs yet."
            if all_jobs
            else "No jobs are running; `insitu ps --all` shows those that have ended."
        )


def _format_row(job: dict[str, Any]) -> tuple[str, ...]:
    if job["state"] == "unreadable":
        return (job["job_id"], "unreadable", *[""] * 7, format_cell(job["reason"]))
    tasks = " ".join(f"{count} {role}" for role, count in job["tasks"].items() if count)
    progress = job["progress"]
    lasted = format_duration((job["ended"] or time.time()) - job["created"])
    return (
        job["job_id"],
        job["state"],
        job["cache"],
        tasks,
        str(job["attempt"]),
        format_position(progress),
        lasted,
        "-" if job.get("bytes") is None else format_size(job["bytes"]),
        "-" if job["exit_code"] is None else str(job["exit_code"]),
        format_cell(job["reason"]),
    )


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    options_first = {"allow_interspersed_args": False}
    command = take_options(JobOptions, START_ARGUMENTS, start, complete={"nodes": complete_node})
    app.command(cls=StartCommand, help=START_EXAMPLES, context_settings=options_first)(command)
    for command in (resume, scale, stop, ps):
        app.command()(command)
