"""The describe command: prints everything about one job, or about one cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from insitu.cli.completion import complete_cache, complete_job
from insitu.cli.console import (
    JsonOption,
    format_duration,
    format_position,
    format_time,
    print_json,
    print_table,
)
from insitu.cli.goodput import print_goodput
from insitu.cli.ignite import ConfigOption, find_address, format_refreshes, format_snapshot
from insitu.cli.ledger import print_ledger
from insitu.cli.rates import print_rates
from insitu.errors import InputError, UnknownCache, UnknownJob
from insitu.paths import Paths
from insitu.service import build_job_report, format_staleness

if TYPE_CHECKING:
    from insitu.paths import JobPaths


_SHOWN_EVALUATIONS = 20
"""How many of the last evaluations are printed; --json has all."""


def complete_either(incomplete: str) -> list[str]:
    """Return, for the shell, caches and jobs that begin with what was typed."""
    return [*complete_cache(incomplete), *complete_job(incomplete)]


def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CACHE_OR_JOB",
            help="A cache's name, or a job's id or enough of its beginning.",
            autocompletion=complete_either,
        ),
    ],
    as_json: JsonOption = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Of a job: audit the rows of each epoch.")] = False,
    events: Annotated[bool, typer.Option("--events", help="Of a job: everything that happened.")] = False,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Of a job: where each second went, and what to do about it.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Of a cache: check every partition.")] = False,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Of a cache: what its columns hold, by a sample of rows.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Show all about a cache, or about a job. A name that both have means the cache.

    The address of a cache of Apache Ignite means that one; --verify reads it, for the rows of each partition.

    Examples:

    ```
    insitu describe digits/train --verify
    insitu describe digits/train --statistics
    insitu describe digits-3fa9c1 --ledger
    insitu describe digits-3fa9c1 --goodput
    insitu describe digits-3fa9c1 --json
    insitu describe ignite://grid-1/DIGITS
    ```
    """
    from insitu.cli.data import describe_cache
    from insitu.cli.ignite import describe_ignite_cache
    from insitu.grid.ignite import is_ignite_address

    of_jobs = {"--ledger": ledger, "--events": events, "--goodput": goodput}
    name = find_address(name, config)
    if is_ignite_address(name):
        _refuse_options(f"{name} is a cache of Ignite", "a job", of_jobs)
        _refuse_options(f"{name} is a cache of Ignite", "a cache", {"--statistics": statistics})
        describe_ignite_cache(name, as_json, verify)
        return
    job = find_cache_or_job(Paths.default(), name)
    if job is not None:
        _refuse_options(f"{name} is a job", "a cache", {"--verify": verify, "--statistics": statistics})
        describe_job(job, as_json=as_json, ledger=ledger, events=events, goodput=goodput)
        return
    _refuse_options(f"{name} is a cache", "a job", of_jobs)
    describe_cache(name, as_json, verify, statistics)


def find_cache_or_job(paths: Paths, name: str) -> JobPaths | None:
    """Return None where `name` is that of a cache, else the job that it means. Raises UnknownJob."""
    from insitu.cluster import find_job
    from insitu.grid import Catalog

    if Catalog(paths).find(name) is not None:
        return None
    try:
        return find_job(paths, name)
    except UnknownJob as error:
        _raise_unknown(paths, name, error)


def _refuse_options(fact: str, other: str, options: dict[str, bool]) -> None:
    given = [option for option, value in options.items() if value]
    if given:
        raise InputError(
            f"{' and '.join(options)} can be asked of {other} only, and {fact}. Received: {' '.join(given)}. "
            f"Leave it out, or name {other}: `insitu {'caches' if other == 'a cache' else 'ps --all'}` lists "
            f"them"
        )


def _raise_unknown(paths: Paths, name: str, no_job: UnknownJob) -> NoReturn:
    """Raise the more helpful error: that no cache has the name, or why no job matches."""
    from insitu.grid import Catalog

    if no_job.matches:
        raise no_job
    try:
        Catalog(paths).get(name)
    except UnknownCache as no_cache:
        raise UnknownJob(f"{no_cache.message}. {no_job.message}") from None
    raise no_job


def describe_job(job: JobPaths, *, as_json: bool, ledger: bool, events: bool, goodput: bool = False) -> None:
    """Print one job."""
    report = build_job_report(job, ledger=ledger, events=events, goodput=goodput)
    if as_json:
        print_json(report)
    else:
        print_job_report(report)


def print_job_report(report: dict[str, Any]) -> None:
    """Print what `build_job_report` of `insitu.service` returns."""
    _print_job(report)
    if "ledger" in report:
        print_ledger(report["ledger"], report["servers"])
    if "goodput" in report:
        print_goodput(report["goodput"])
    if "events" in report:
        for entry in report["events"]:
            fields = ", ".join(f"{k}={v}" for k, v in entry["event"].items() if k != "event" and v)
            typer.echo(f"{format_time(entry['at'])}  {entry['event']['event']}  {fields}".rstrip())


def _print_job(job: dict[str, Any]) -> None:
    ended = f", {format_duration(job['ended'] - job['created'])} after its start" if job["ended"] else ""
    code = f" with exit code {job['exit_code']}" if job["exit_code"] is not None else ""
    facts = {
        "Job": job["job_id"],
        "State": f"{job['state']}{code}{ended}",
        "Reason": job["reason"],
        "Started": f"{format_time(job['created'])} ({format_duration(time.time() - job['created'])} ago)",
        "Cache": _format_cache(job),
        "Snapshot": format_snapshot(job),
        "Refreshed": format_refreshes(job),
        "Command": " ".join(job["command"]),
        "Settings": f"{job['workers']} worker(s), {len(job['shards'])} shard(s), "
        f"{job['threads']} thread(s) per replica, seed {job['seed']}, "
        f"stall timeout {job['stall_timeout']:g} s, engine {job['engine']}",
        "Environment": " ".join(f"{name}={value}" for name, value in job["settings"].items()),
        "Strategy": "{strategy}, gradients: {gradients}".format(**job["strategy"]) if job["strategy"] else "",
        "Recovery": f"{job['on_loss']} a lost worker, {_format_standby(job['standby'])}, "
        f"generation {job['generation']}",
        "Checkpoints": ", ".join(job["checkpoints"]) or "none",
        "Folder": job["folder"],
    }
    for name, fact in facts.items():
        if fact:
            typer.echo(f"{name + ':':<13}{fact}")
    typer.echo("")
    header = ("TASK", "NODE", "SHARDS", "STATE", "PROGRESS", "ROWS", "READ LOCALLY", "READ REMOTELY")
    print_table(header, (_format_task(task) for task in job["task_list"]))
    print_rates(job["task_list"])
    typer.echo("")
    print_table(
        ("ATTEMPT", "STARTED", "LASTED", "CAME TO", "ENDED BECAUSE"),
        (_format_attempt(attempt) for attempt in job["attempts"]),
    )
    _print_recoveries(job["recoveries"])
    _print_evaluations(job["evaluations"])
    _print_servers(job["servers"])
    for straggler in job["stragglers"]:
        behind = f", {straggler['steps']} steps behind" if straggler["steps"] else ""
        late = f"last in {straggler['share']:.0%} of the steps, by {1000 * straggler['seconds']:.1f} ms"
        typer.echo(f"\n{straggler['task']} is {late}{behind}: the others wait for it")


def _format_cache(job: dict[str, Any]) -> str:
    from insitu.spec import NO_CACHE

    if job["cache"] == NO_CACHE:
        return "none, the script brings its own data, of which no ledger is kept"
    return f"{job['cache']} version {job['cache_version']}"


def _print_servers(servers: list[dict[str, Any]]) -> None:
    """Print what parameter servers held at their last report, and how late gradients came to them."""
    if not servers:
        return
    typer.echo("")
    rows = []
    for server in servers:
        held = [
            (name, f"rows [{start:,}, {stop:,})", size) for name, start, stop, _, size in server["pieces"]
        ]
        held += [(n, f"{t['rows']:,} rows by key", t["bytes"]) for n, t in server["tables"].items()]
        rows += [(f"ps:{server['server']}", name, what, f"{size:,}") for name, what, size in held]
    print_table(("SERVER", "HOLDS", "OF IT", "BYTES"), rows)
    for server in servers:
        total = server["bytes"] + server["slot_bytes"] + sum(t["bytes"] for t in server["tables"].values())
        late = f", {server['dropped']:,} dropped late with {server['dropped_rows']:,} rows"
        late = late if server["dropped"] else ""
        lost = f", {server['lost']:,} lost with a server" if server["lost"] else ""
        typer.echo(
            f"ps:{server['server']} ({server['mode']}): {total:,} bytes with the optimizer's, "
            f"{server['applied']:,} gradients applied{late}{lost}; staleness "
            f"{format_staleness(server['staleness'])}"
        )


def _format_standby(count: int | None) -> str:
    return "a process stands by if memory allows" if count is None else f"{count} processes stand by"


def _print_recoveries(recoveries: list[dict[str, Any]]) -> None:
    if not recoveries:
        return
    typer.echo("")
    print_table(
        ("MEMBERSHIP", "TASKS", "WHEN", "AT", "GENERATION", "NEXT STEP AFTER", "BECAUSE"),
        (
            (
                entry["how"],
                ", ".join(entry["tasks"]),
                format_time(entry["at"]),
                format_position(entry["steps"]),
                str(entry["generation"]),
                "-" if entry["seconds"] is None else f"{entry['seconds']:.2f} s",
                entry["text"],
            )
            for entry in recoveries
        ),
    )


def _print_evaluations(evaluations: list[dict[str, Any]]) -> None:
    if not evaluations:
        return
    typer.echo("")
    print_table(
        ("EVALUATION OF", "UPDATES", "WHEN", "TOOK", "SCORES"),
        (
            (
                each["checkpoint"],
                "-" if each["iterations"] is None else f"{each['iterations']:,}",
                format_time(each["at"]),
                f"{each['seconds']:.2f} s",
                ", ".join(f"{name} {value:.6g}" for name, value in each["metrics"].items()),
            )
            for each in evaluations[-_SHOWN_EVALUATIONS:]
        ),
    )


def _format_task(task: dict[str, Any]) -> tuple[str, ...]:
    progress, reads = task["progress"], task["reads"]
    running = "running" if task["member"] else "joining or leaving"
    ended = "ended" if task["code"] == 0 else f"ended ({task['code']})"
    return (
        task["task"],
        task["node"],
        ",".join(map(str, task["shards"])) or "-",
        running if task["alive"] else "-" if task["code"] is None else ended,
        format_position(progress),
        f"{progress['rows']:,}" if progress else "-",
        f"{reads['local_bytes']:,} B" if reads else "-",
        f"{reads['remote_bytes']:,} B" if reads else "-",
    )


def _format_attempt(attempt: dict[str, Any]) -> tuple[str, ...]:
    progress, cause = attempt["progress"], attempt["cause"]
    lasted = format_duration(attempt["ended"] - attempt["started"]) if attempt["ended"] else "under way"
    return (
        str(attempt["number"]),
        format_time(attempt["started"]),
        lasted,
        format_position(progress),
        cause["text"] if cause else "-",
    )


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(describe)
