"""Commands that start, follow and stop jobs: start, attach, stop, ps, logs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.cli import INTERRUPTED
from insitu.cli.command_group import START_EXAMPLES, StartCommand
from insitu.cli.completion import complete_job, complete_node, complete_start, complete_task
from insitu.cli.console import (
    JsonOption,
    OutputPrinter,
    format_cell,
    format_duration,
    format_position,
    print_json,
    print_notice,
    print_table,
)
from insitu.cli.full_disk import watch_disk
from insitu.cli.ignite import (
    ArrowOption,
    ConfigOption,
    FillOption,
    RaggedOption,
    RefreshOption,
    TensorOption,
    WithoutOption,
    find_refresh,
    read_cache_of_ignite,
)
from insitu.errors import ClusterError, InputError
from insitu.paths import Paths
from insitu.service import find_incarnation, summarize_job

if TYPE_CHECKING:
    from insitu.cluster import Request
    from insitu.paths import JobPaths


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB_ID", help="The job's id, or enough of its beginning.", autocompletion=complete_job
    ),
]
PrefixOption = Annotated[bool, typer.Option("--prefix/--no-prefix", help="Show each line's task before it.")]


def start(
    cache: Annotated[
        str,
        typer.Argument(
            metavar="CACHE",
            help="The cache to train on, or ignite://HOST[:PORT][,HOST...]/NAME; - for none.",
            autocompletion=complete_start,
        ),
    ],
    job_dir: Annotated[Path, typer.Argument(metavar="JOB_DIR", help="Folder or .zip with the script.")],
    command: Annotated[
        list[str], typer.Argument(metavar="JOB_CMD [JOB_ARGS]", help="What to run in JOB_DIR.")
    ],
    workers: Annotated[
        int | None, typer.Option(help="Worker tasks.", show_default="one per node that owns data")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="A node to run on; may be repeated.", show_default="all", autocompletion=complete_node
        ),
    ] = None,
    ps: Annotated[
        str, typer.Option(metavar="M|auto", help="Parameter server tasks; auto: one on each node.")
    ] = "0",
    ps_backups: Annotated[
        int, typer.Option(help="Other servers that mirror each server, so that losing one costs nothing.")
    ] = 0,
    chief: Annotated[bool, typer.Option("--chief", help="Add a chief, which trains as well.")] = False,
    evaluator: Annotated[bool, typer.Option("--evaluator", help="Add a scorer of checkpoints.")] = False,
    evaluator_grace: Annotated[
        float | None, typer.Option(metavar="SEC", help="How long it may score on.", show_default="600")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or hosts.", show_default="hosts, if up")] = "",
    name: Annotated[
        str | None, typer.Option(help="Beginning of the job's id.", show_default="CACHE's last part")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Don't stream the output.")] = False,
    max_restarts: Annotated[int, typer.Option(help="How often a failed job is started again.")] = 3,
    seed: Annotated[int, typer.Option(help="What all randomness follows from.")] = 0,
    stall_timeout: Annotated[
        float, typer.Option(metavar="SEC", help="A job without progress for so long has failed.")
    ] = 600.0,
    threads: Annotated[
        int | None, typer.Option(help="Backend threads per replica.", show_default="cores / workers")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Shards to train on, spread over the workers.", show_default="--workers"),
    ] = None,
    virtual_devices: Annotated[
        str | None,
        typer.Option(metavar="N|KIND:N", help="Make several devices out of one: cpu:4, gpu:2."),
    ] = None,
    memory_growth: Annotated[
        bool | None, typer.Option(help="Take GPU memory as it is needed.", show_default="the backend's")
    ] = None,
    memory_limit: Annotated[
        int | None, typer.Option(metavar="MIB", help="Memory to take of each GPU.", show_default="all")
    ] = None,
    soft_placement: Annotated[
        bool | None, typer.Option(help="Use the CPU for a device that isn't there.", show_default="an error")
    ] = None,
    log_placement: Annotated[
        bool | None, typer.Option(help="Print where variables and operations go.", show_default="off")
    ] = None,
    on_loss: Annotated[
        str, typer.Option(metavar="replace|adopt|restart", help="What to do when a worker is lost.")
    ] = "replace",
    on_rebalance: Annotated[
        str, typer.Option(metavar="follow|stay", help="What workers do when their data moves.")
    ] = "follow",
    standby: Annotated[
        int | None,
        typer.Option(
            help="Warmed processes that can take a lost worker's place.", show_default="1 if memory allows"
        ),
    ] = None,
    memory_checkpoint: Annotated[
        bool,
        typer.Option("--memory-checkpoint", help="Keep checkpoints in the memory of the other workers, too."),
    ] = False,
    on_take_over: Annotated[
        str, typer.Option(metavar="wait|resume", help="What to do where another host becomes the head's.")
    ] = "wait",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable that is no secret, though it is named like one."),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Let JAX, TensorFlow connect hosts without a secret."),
    ] = False,
    tensor: TensorOption = None,
    fill: FillOption = None,
    arrow: ArrowOption = None,
    without: WithoutOption = None,
    ragged: RaggedOption = None,
    config: ConfigOption = None,
    gpus_per_worker: Annotated[
        int, typer.Option(metavar="N", help="GPUs that each worker has for itself.", show_default="any")
    ] = 0,
    memory_per_worker: Annotated[
        int, typer.Option(metavar="MIB", help="Main memory each worker must find free.", show_default="any")
    ] = 0,
    cores_per_worker: Annotated[
        int, typer.Option(metavar="N", help="Processors each worker has for itself.", show_default="any")
    ] = 0,
    refresh: RefreshOption = "never",
    mixed: Annotated[bool, typer.Option("--allow-mixed-processors", help="Hosts may differ.")] = False,
    prefix: PrefixOption = True,
) -> None:
    from insitu.cluster import Request, submit
    from insitu.config import DeviceSettings, parse_virtual_devices

    every = find_refresh(refresh)
    request = Request(
        cache=read_cache_of_ignite(cache, job_dir, tensor, fill, arrow, without, ragged, config, engine),
        job_dir=job_dir,
        command=tuple(command),
        nodes=tuple(node or ()),
        workers=workers,
        shards=shards,
        on_loss=on_loss,  # type: ignore[arg-type]
        on_rebalance=on_rebalance,  # type: ignore[arg-type]
        on_take_over=on_take_over,  # type: ignore[arg-type]
        env=tuple(env or ()),
        standby=standby,
        memory_checkpoint=memory_checkpoint,
        allow_unauthenticated=allow_unauthenticated,
        allow_mixed_processors=mixed,
        gpus_per_worker=gpus_per_worker,
        memory_per_worker=memory_per_worker,
        cores_per_worker=cores_per_worker,
        refresh=every,
        ps=parse_server_tasks(ps),
        ps_backups=ps_backups,
        chief=chief,
        evaluator=evaluator,
        evaluator_grace=evaluator_grace,
        engine=engine,
        name=name,
        max_restarts=max_restarts,
        seed=seed,
        threads=threads,
        stall_timeout=stall_timeout,
        settings=DeviceSettings(
            virtual_devices=parse_virtual_devices(virtual_devices) if virtual_devices else None,
            memory_growth=memory_growth,
            memory_limit=memory_limit,
            soft_placement=soft_placement,
            log_placement=log_placement,
        ),
    )
    paths = Paths.default()
    job_id = submit(paths, request)
    print_notice(job_id)
    _tell_of_shell(request)
    if not detach:
        raise typer.Exit(stream(paths.job(job_id), prefix=prefix))


def _tell_of_shell(request: Request) -> None:
    """Print which settings of this shell the job has taken over, and which secrets it doesn't get."""
    from insitu.cluster import find_inherited_settings, find_withheld_secrets

    if inherited := find_inherited_settings(request.settings):
        listed = " ".join(f"{name}={value}" for name, value in inherited.items())
        print_notice(f"Settings of this shell that the job has taken over: {listed}")
    if withheld := find_withheld_secrets(request):
        print_notice(
            f"Secrets of this shell that the job doesn't get, since it may go on by itself: "
            f"{', '.join(withheld)}. --env NAME keeps one that is none"
        )


def parse_server_tasks(text: str) -> int | None:
    """Return the number of tasks that --ps asks for, None for one on each node. Raises InputError."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit():
        raise InputError(
            f"--ps must be a number of tasks, at least 0, or auto: one on each node. Received: {text}"
        )
    return int(text)


def stream(job: JobPaths, *, prefix: bool, start: int = 0) -> int:
    """Print the job's output from byte `start` to its end. Returns the exit code to end with."""
    from insitu.cluster import is_running, read_exit_code

    printer = OutputPrinter(prefix=prefix)
    try:
        is_over = watch_disk(job, lambda: not is_running(job))
        for lines in _follow(job, job.output, is_over, start=start):
            printer.print(lines)
    except KeyboardInterrupt:
        name = job.root.name
        print_notice(
            f"\nDetached; {name} goes on. `insitu attach {name}` follows it, `insitu stop {name}` stops it."
        )
        return INTERRUPTED
    return read_exit_code(job)


def _follow(
    job: JobPaths, log: Path, is_over: Callable[[], bool], *, start: int = 0
) -> Iterator[list[bytes]]:
    """Yield the lines of one of the job's logs; see `follow`. Raises ClusterError where it can't be read."""
    from insitu.cluster import follow, read_status

    try:
        yield from follow(log, is_over, start=start)
    except OSError as error:
        # Raises for a folder that holds no job.
        read_status(job)
        raise ClusterError(
            f"A log of {job.root.name} can't be read: {error}. If it was deleted its lines are lost; "
            f"`insitu describe {job.root.name}` shows the rest of the job"
        ) from error


def attach(job_id: JobArgument, prefix: PrefixOption = True) -> None:
    """Replay a job's output from its start, then follow it. The exit code is the training's.

    Examples:

        insitu attach digits-3fa9c1
    """
    from insitu.cluster import find_job

    raise typer.Exit(stream(find_job(Paths.default(), job_id), prefix=prefix))


def resume(
    job_id: JobArgument,
    detach: Annotated[bool, typer.Option("--detach", help="Don't stream the output.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable that the job takes from this shell, set or not."),
    ] = None,
    env_on_stdin: Annotated[bool, typer.Option("--env-on-stdin", hidden=True)] = False,
    prefix: PrefixOption = True,
) -> None:
    """Let a job that was stopped, has failed or lost its machine go on from its last checkpoint.

    Shards, seed and variables stay the same, so it ends with the weights of a job that was never interrupted.
    Secrets aren't kept with a job: it takes those of this shell. Where the machine of the job is lost, its
    hosts keep copies: after `insitu up --take-over` the newest one is brought to this machine. Exits with 3
    if the job has finished, with 2 if it runs.

    Examples:

        insitu resume digits-3fa9c1
    """
    from insitu.cluster import Shell, find_or_bring_job, resume_job

    job = find_or_bring_job(Paths.default(), job_id, print_notice)
    shell = Shell(os.environ, tuple(env or ()))
    if env_on_stdin:
        shell = Shell.of_server(json.loads(sys.stdin.read() or "{}"))
    lines: list[str] = []
    start = resume_job(job, shell, lines.append)
    print_notice(job.root.name)
    for line in lines if detach else ():  # they are in the output, too
        print_notice(line)
    if not detach:
        raise typer.Exit(stream(job, prefix=prefix, start=start))


def scale(
    job_id: JobArgument,
    workers: Annotated[int, typer.Argument(metavar="N", help="Workers from now on: 1 to its shards.")],
) -> None:
    """Give a running job more workers, or fewer. Its shards and its final weights stay the same.

    Examples:

        insitu scale digits-3fa9c1 4
    """
    from insitu.cluster import find_job, scale_job

    print_notice(scale_job(find_job(Paths.default(), job_id), workers))


def stop(job_id: JobArgument) -> None:
    """Stop a job: its tasks get SIGTERM, and SIGKILL ten seconds later. A second `stop` kills at once.

    Waits until nothing of the job runs any more. A controller or supervisor that doesn't answer is killed.
    Exits with 3 if the job had ended already.

    Examples:

        insitu stop digits-3fa9c1
    """
    from insitu.cluster import find_job

    stop_and_wait(find_job(Paths.default(), job_id))


def stop_and_wait(job: JobPaths) -> None:
    """Stop a job and wait until nothing of it runs any more. Raises JobEnded where it has ended already."""
    from insitu.cluster import end_job, read_status

    end_job(job, print_notice)
    print_notice(f"{job.root.name} has ended: {read_status(job).state.phase}")


def ps(
    all_jobs: Annotated[bool, typer.Option("--all", "-a", help="Show jobs that have ended, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the running jobs.

    DURATION is the time since the start, of a job that has ended until its end. REASON says why a job failed
    or was stopped; `insitu describe JOB` shows all of it.

    Examples:

    ```
    insitu ps
    insitu ps --all --json
    ```
    """
    from insitu.cluster import list_jobs

    print_jobs(list(map(summarize_job, list_jobs(Paths.default(), all_jobs=all_jobs))), all_jobs, as_json)


def print_jobs(jobs: list[dict[str, Any]], all_jobs: bool, as_json: bool) -> None:
    """Print jobs as `summarize_job` of `insitu.service` returns them."""
    if as_json:
        print_json(jobs)
    elif jobs:
        header = ("JOB", "STATE", "CACHE", "TASKS", "ATTEMPT", "PROGRESS", "DURATION", "EXIT", "REASON")
        print_table(header, map(_format_row, jobs))
    else:
        print_notice(
            "No jobs yet."
            if all_jobs
            else "No jobs are running; `insitu ps --all` shows those that have ended."
        )


def _format_row(job: dict[str, Any]) -> tuple[str, ...]:
    if job["state"] == "unreadable":
        return (job["job_id"], "unreadable", *[""] * 6, format_cell(job["reason"]))
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
        "-" if job["exit_code"] is None else str(job["exit_code"]),
        format_cell(job["reason"]),
    )


def logs(
    job_id: JobArgument,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK", help="Such as worker:0.", show_default="all, merged", autocompletion=complete_task
        ),
    ] = None,
    follow_it: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    incarnation: Annotated[
        int | None,
        typer.Option("--attempt", help="Which start of the task, from 1.", show_default="the latest", min=1),
    ] = None,
    prefix: PrefixOption = True,
) -> None:
    """Print a job's output: of all tasks merged, or one task's own, as it wrote it.

    Examples:

    ```
    insitu logs digits-3fa9c1
    insitu logs digits-3fa9c1 worker:1 --attempt 1
    insitu logs -f digits-3fa9c1 chief
    ```
    """
    from insitu.cluster import find_job, is_running

    job = find_job(Paths.default(), job_id)
    over = (lambda: not is_running(job)) if follow_it else (lambda: True)
    if task is None:
        if incarnation is not None:
            raise InputError(
                f"--attempt goes with a TASK: the merged output holds all of them. Received: {incarnation}"
            )
        printer = OutputPrinter(prefix=prefix, all_to_stdout=True)
        batches: Iterable[list[bytes]] = _follow(job, job.output, over)
        for lines in batches:
            printer.print(lines)
        return
    raw = OutputPrinter(prefix=False)
    for lines in follow_task(job, task, incarnation, over):
        raw.print_raw(lines)


def follow_task(
    job: JobPaths, text: str, incarnation: int | None, is_over: Callable[[], bool]
) -> Iterator[list[bytes]]:
    """Yield the lines of one task's own log, in batches as they come, until `is_over`.

    `incarnation` is its number, from 1. None is the latest, and then those that come after.
    Raises InputError for a task that the job doesn't have and for an incarnation that there never was.
    """
    task, latest = find_incarnation(job, text)
    if not 1 <= (incarnation or latest) <= latest:
        count = "1 incarnation" if latest == 1 else f"{latest} incarnations"
        advice = f"Give --attempt 1 to {latest}" if latest else "Ask again once it has been started"
        raise InputError(f"{task} has had {count}. {advice}. Received: {incarnation or 'no --attempt'}")
    if incarnation is not None:
        yield from _follow(job, job.task_log(task, incarnation), is_over)
        return
    number = latest
    while (log := job.task_log(task, number)).exists():
        number += 1
        successor = job.task_log(task, number)
        yield from _follow(job, log, partial(_is_over_or_replaced, is_over, successor))


def _is_over_or_replaced(is_over: Callable[[], bool], successor: Path) -> bool:
    return is_over() or successor.exists()


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    options_first = {"allow_interspersed_args": False}
    app.command(cls=StartCommand, help=START_EXAMPLES, context_settings=options_first)(start)
    for command in (attach, resume, scale, stop, ps, logs):
        app.command()(command)
