"""`insitu --url https://HOST:PORT`: commands that a page elsewhere answers, by its REST interface."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from insitu.base.errors import InputError, InsituError
from insitu.base.paths import Paths
from insitu.cli import INTERRUPTED
from insitu.cli.command_group import StartCommand, VersionedGroup, take_options
from insitu.cli.console import JsonOption, escape_controls, format_size, print_json, print_notice, print_table
from insitu.cli.jobs import START_ARGUMENTS, print_jobs
from insitu.cli.outside import ARGUMENTS
from insitu.cli.rest import TOKEN_FILE_ENV, URL_ENV, RestClient, open_client
from insitu.options import JobOptions, list_given

URL_OPTION: dict[str, Any] = {
    "metavar": "URL",
    "help": f"Ask the page at this address; a token of it is in ${TOKEN_FILE_ENV}.",
    "show_default": f"${URL_ENV}",
}
COMMANDS = ("start", "ps", "describe", "logs", "stop", "resume", "scale", "caches", "nodes")
_PAGE = 2000
_INTERVAL = 0.5
_ENDED = ("finished", "failed", "stopped")
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, or enough of its beginning.")]


_START_HELP = """
Send JOB_DIR to the page, and start JOB_CMD there on a cache of the page.

JOB_DIR is a folder or a .zip of this machine. What is left out of a folder, and how much it may hold, is as
for `insitu start` without --url. Prints the job's id first, then the training's output, and ends with its
exit code; Ctrl-C leaves the job running. Needs a token with the role operate.

Examples:

    insitu --url https://grid-1:8780 start digits/train ./my_job train.py --epochs 3
    insitu --url https://grid-1:8780 start --detach --workers 2 - job.zip train.py
"""


def run_by_url(url: str) -> None:
    """Have a page answer the command, and exit, where the user says so; or do nothing.

    Raises InputError for a command that a page can't be asked for.
    """
    arguments: list[str] = click.get_current_context().meta.get(ARGUMENTS, [])
    address = url or os.environ.get(URL_ENV, "")
    if not address or not arguments:
        return
    if arguments[0] not in COMMANDS:
        if not url:
            return  # of this machine, wherever the variable points to
        raise InputError(
            f"A page can be asked for {', '.join(COMMANDS)}. Received: {arguments[0]} with --url {address}. "
            f"Leave --url out to run it on this machine"
        )
    build_url_app()(arguments, prog_name="insitu --url URL", obj=address)


def build_url_app() -> Any:
    """Return the commands, as a Typer application whose object is the address of the page that they ask."""
    app = typer.Typer(
        name="insitu --url URL",
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        cls=VersionedGroup,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    options_first = {"allow_interspersed_args": False}
    app.command(cls=StartCommand, help=_START_HELP, context_settings=options_first)(
        take_options(JobOptions, START_ARGUMENTS, start, without=lambda option: "url" in option.not_at)
    )
    for command in (ps, describe, logs, stop, resume, scale, caches, nodes):
        app.command()(command)
    app.callback()(_pass)
    return app


def _pass() -> None:
    """Ask a page elsewhere."""


def _client() -> RestClient:
    return open_client(click.get_current_context().obj)


def ps(
    all_jobs: Annotated[bool, typer.Option("--all", "-a", help="Show jobs that have ended, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the running jobs."""
    found: list[dict[str, Any]] = []
    while page := _client().get("jobs", limit=1000, offset=len(found)):
        found += page
        if len(page) < 1000:
            break
    print_jobs([job for job in found if all_jobs or job["state"] not in _ENDED], all_jobs, as_json)


def describe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A cache's name, or a job's id.")],
    as_json: JsonOption = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Of a job: audit the rows of each epoch.")] = False,
    events: Annotated[bool, typer.Option("--events", help="Of a job: everything that happened.")] = False,
    goodput: Annotated[bool, typer.Option("--goodput", help="Of a job: where each second went.")] = False,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Of a cache: what its columns hold.")
    ] = False,
) -> None:
    """Show all about a cache, or about a job. A name that both have means the cache."""
    from insitu.cli.describe import print_job_report

    client = _client()
    if any(cache["name"] == name for cache in client.get("caches")):
        report = client.get("caches", name)
        if statistics:
            report["statistics"] = client.get("statistics", name)
        print_json(report) if as_json else _print_cache(report)
        return
    report = client.get("jobs", name, ledger=ledger, events=events, goodput=goodput)
    print_json(report) if as_json else print_job_report(report)


def _print_cache(report: dict[str, Any]) -> None:
    from insitu.cli.data import print_caches, print_statistics

    print_caches([{**report, "partitions": len(report["partition_list"])}], as_json=False)
    typer.echo("")
    rows = (
        (str(p["index"]), f"{p['rows']:,}", format_size(p["bytes"]), p["primary"], ", ".join(p["backups"]))
        for p in report["partition_list"]
    )
    print_table(("PARTITION", "ROWS", "SIZE", "PRIMARY", "BACKUPS"), rows)
    if "statistics" in report:
        print_statistics(report["statistics"])


def logs(
    job_id: JobArgument,
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Such as worker:0.", show_default="all")
    ] = None,
    follow_it: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")] = False,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Attempt of the task.")] = None,
) -> None:
    """Print a job's output: of all tasks merged, or one task's own."""
    client = _client()
    lines = _read_lines(client, job_id, task, attempt, lambda: not follow_it or _has_ended(client, job_id))
    for source, text in lines:
        sys.stdout.write(_format_line(source, text))


def _read_lines(
    client: RestClient, job_id: str, task: str | None, attempt: int | None, is_over: Callable[[], bool]
) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of the lines of a log, as they come, until `is_over`."""
    at = 0
    while True:
        over = is_over()
        page: dict[str, Any] = {"lines": [None]}
        while page["lines"]:
            page = client.get("jobs", job_id, "logs", task=task, attempt=attempt, after=str(at), lines=_PAGE)
            yield from ((line["source"], line["text"]) for line in page["lines"])
            at = int(page["end"])
        sys.stdout.flush()
        if over:
            return
        time.sleep(_INTERVAL)


def _has_ended(client: RestClient, job_id: str) -> bool:
    return client.get("jobs", job_id)["state"] in _ENDED


def _format_line(source: str, text: str) -> str:
    """Return a line of a log with its task before it, without the terminal's control codes."""
    head = f"[{source}] " if source else ""
    return f"{head}{escape_controls(text, chr(9))}\n"


def _follow_job(client: RestClient, job_id: str) -> int:
    """Print a job's output to its end: lines of insitu itself on stderr. Returns its exit code."""
    for source, text in _read_lines(client, job_id, None, None, lambda: _has_ended(client, job_id)):
        stream = sys.stderr if source == "insitu" else sys.stdout
        stream.write(_format_line(source, text))
    return int(client.get("jobs", job_id)["exit_code"])


def start(options: JobOptions) -> None:
    """Start a job on the page, and follow it."""
    client = _client()
    job = send_job(client, options.job_dir, write_fields(options))
    if options.detach:
        typer.echo(job)
        return
    print_notice(job)
    try:
        code = _follow_job(client, job)
    except KeyboardInterrupt:
        print_notice(
            f"\nDetached; {job} goes on. `insitu --url {client.url} logs -f {job}` follows it, "
            f"`insitu --url {client.url} stop {job}` stops it."
        )
        code = INTERRUPTED
    raise typer.Exit(code)


def write_fields(options: JobOptions) -> dict[str, Any]:
    """Return what the REST interface takes to start the same job; what has its default is left out."""
    fields = {each.name: each.write(value) for each, value in list_given(options, "rest")}
    return {"cache": options.cache, "command": list(options.command), **fields}


def send_job(client: RestClient, job_dir: Path, fields: dict[str, Any]) -> str:
    """Send a job's folder and start the job. Returns its id.

    Raises InputError where the token, the folder or a field can't be used, and what the page answers.
    """
    session = client.get("session")
    if session["role"] != "operate":
        raise InputError(
            f"A job is started with a token of the role operate. Received: one of the role "
            f"{session['role']}. The file ui-USER.json of the page has both"
        )
    with tempfile.TemporaryDirectory(prefix="insitu-start-") as folder:
        archive = pack_job(job_dir, Path(folder))
        # Without a cache the job is named after it.
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", job_dir.absolute().stem).lstrip(".-")[:90]
        upload = client.send("uploads", file=archive, name=f"{stem or 'job'}.zip")["upload"]
    try:
        started = client.post("jobs", **fields, upload=upload)
    except BaseException:
        with contextlib.suppress(InsituError):
            client.delete("uploads", str(upload))
        raise
    return str(started["job_id"])


def pack_job(job_dir: Path, folder: Path) -> Path:
    """Return a .zip of JOB_DIR: itself where it is one, else one that is made in `folder`.

    Raises JobSpecError for what `insitu start` would refuse.
    """
    from insitu.cluster import pack_code

    return pack_code(job_dir, folder, Paths.default().home)


def stop(job_id: JobArgument) -> None:
    """Stop a job, and wait until it has ended. A second `stop` kills at once."""
    client = _client()
    name = client.post("jobs", job_id, "stop")["job_id"]
    while (state := client.get("jobs", name)["state"]) not in _ENDED:
        time.sleep(_INTERVAL)
    print_notice(f"{name} has ended: {state}")


def resume(
    job_id: JobArgument,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A secret that the job takes from this shell, set or not."),
    ] = None,
) -> None:
    """Let a job go on that has ended, from its last checkpoint. Doesn't stream its output."""
    given = {name: os.environ.get(name) for name in env or ()}
    done = _client().post("jobs", job_id, "resume", env=given)
    typer.echo(done["job_id"])
    for line in done["notices"]:
        print_notice(line)


def scale(job_id: JobArgument, workers: Annotated[int, typer.Argument(metavar="N", help="Workers.")]) -> None:
    """Give a running job more workers, or fewer."""
    print_notice(_client().post("jobs", job_id, "scale", workers=workers)["reply"])


def caches(as_json: JsonOption = False) -> None:
    """List the caches."""
    from insitu.cli.data import print_caches

    print_caches(_client().get("caches"), as_json)


def nodes(as_json: JsonOption = False) -> None:
    """List the nodes."""
    found = _client().get("nodes")
    if as_json:
        print_json(found)
        return
    header = ("NODE", "STATE", "HOST", "CORES", "PRIMARIES", "BACKUPS", "ROWS")
    rows = (
        (
            node["node"],
            node["state"] or "local",
            node["host"] or "-",
            str(node["cores"] or "-"),
            f"{node['primaries']:,}",
            f"{node['backups']:,}",
            f"{node['rows']:,}",
        )
        for node in found
    )
    print_table(header, rows)
