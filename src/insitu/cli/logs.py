"""Commands that print what a job's tasks print: attach, logs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import JobPaths, Paths
from insitu.cli import INTERRUPTED
from insitu.cli.completion import complete_job, complete_task
from insitu.cli.console import OutputPrinter, print_notice
from insitu.service import find_incarnation

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths


# Says that the disk of a job is full, while a command follows the job


def watch_disk(job: JobPaths, is_over: Callable[[], bool]) -> Callable[[], bool]:
    """Return `is_over` of a job that is followed, which also says, once, that its disk is full: the job waits
    then, and can't write down why."""
    said = False

    def look() -> bool:
        nonlocal said
        if is_over():
            return True
        if not said and _is_full(job):
            said = True
            print_notice(
                f"The disk of {job.root} is full, and {job.root.name} waits for room to write down what "
                f"happens. Free some space there, or end the job by `insitu stop {job.root.name}`"
            )
        return False

    return look


def _is_full(job: JobPaths) -> bool:
    with contextlib.suppress(OSError):
        found = os.statvfs(job.root)
        # A file system may keep some for root.
        is_root = os.geteuid() == 0
        blocks, files = (found.f_bfree, found.f_ffree) if is_root else (found.f_bavail, found.f_favail)
        return not blocks or (found.f_files > 0 and not files)
    return False


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="The job's id, or enough of its beginning.", autocompletion=complete_job
    ),
]
PrefixOption = Annotated[bool, typer.Option("--prefix/--no-prefix", help="Show each line's task before it.")]


def stream(job: JobPaths, *, prefix: bool, start: int = 0) -> int:
    """Print the job's output from byte `start` to its end. Returns the exit code to end with."""
    from insitu.cluster import is_running, read_exit_code, read_status, split_prefix

    printer = OutputPrinter(prefix=prefix)
    last = b""
    try:
        is_over = watch_disk(job, lambda: not is_running(job))
        for lines in _follow(job, job.output, is_over, start=start):
            printer.print(lines)
            last = lines[-1]
    except KeyboardInterrupt:
        name = job.root.name
        print_notice(
            f"\nDetached; {name} continues. `insitu attach {name}` follows it, `insitu stop {name}` stops it."
        )
        return INTERRUPTED
    state = read_status(job).state
    if state.reason and split_prefix(last)[0] != "insitu":
        # Its processes were killed, and nobody was left to write it.
        print_notice(f"{job.root.name} {state.phase}: {state.reason}")
    return read_exit_code(job)


def _follow(
    job: JobPaths, log: Path, is_over: Callable[[], bool], *, start: int = 0
) -> Iterator[list[bytes]]:
    """Yield the lines of one of the job's logs; see `follow`. Raises ClusterError if it can't be read."""
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


def logs(
    job_id: JobArgument,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="TASK", help="Such as worker:0.", show_default="all, merged", autocompletion=complete_task
        ),
    ] = None,
    follow_it: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    incarnation: Annotated[
        int | None,
        typer.Option("--attempt", help="Attempt of the task, from 1.", show_default="the latest", min=1),
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
    for command in (attach, logs):
        app.command()(command)
